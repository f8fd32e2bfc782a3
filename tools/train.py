"""Train the built-in model on generated text.

``python -m tools.train --tokenizer build/tokenizer.json --out build/checkpoint.pt``
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional

from tools.dataset import rows
from tools.qwen3_torch import Config, Qwen3

HELD_OUT_SEED = 1_000_003
WARM_UP = 150
LOG_EVERY = 50
SAVE_SECONDS = 240
# In the last part of the training, this fraction of the stories in chats is short. In the part before, the fraction is
# `tools.corpus.SHORT_SHARE`, 80 %.
LATE_SHORT_SHARE = 0.45


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(prog="tools.train", description="Train the built-in model.")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer.json"))
    parser.add_argument("--out", type=Path, default=Path("build/checkpoint.pt"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=270_000)
    parser.add_argument("--steps", type=float, default=19_946)
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest time of the schedule")
    parser.add_argument("--batch", type=int, default=3072, help="tokens in a step")
    parser.add_argument("--short", type=int, default=512, help="length of the rows before the last part")
    about_long = "the last part, with rows of the whole context: its fraction of the schedule and of the documents"
    parser.add_argument("--long-share", type=float, default=0.25, help=about_long)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    return parser.parse_args()


def training_rows(args: argparse.Namespace, tokenizer: Tokenizer, context: int) -> tuple[NDArray[np.uint16], ...]:
    """Return the short rows, and the long rows for the last part of the training, from different documents."""
    long = int(args.documents * args.long_share)
    short_rows = rows(tokenizer, args.seed, args.documents - long, args.short)
    return short_rows, rows(tokenizer, args.seed + 1, long, context, LATE_SHORT_SHARE)


def rate_at(progress: float, step: int, peak: float) -> float:
    """Return the learning rate at a fraction `progress` of the schedule: a warm-up, then a cosine to nearly 0."""
    return peak * min(1.0, (step + 1) / WARM_UP) * (0.005 + 0.995 * (1 + math.cos(math.pi * progress)) / 2)


def make_optimizers(model: Qwen3, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms.

    After four minutes the held-out perplexity was 5.05 with AdamW alone, and 4.28 with Muon at the same learning rate.
    """
    layers = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("embed")]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [model.embed.weight], "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True),
        torch.optim.Muon(layers, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]


def loss_of(model: Any, batch: NDArray[np.uint16]) -> torch.Tensor:
    """Return the mean cross-entropy of next tokens."""
    tokens = torch.from_numpy(batch.astype(np.int64))
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def perplexity(model: Any, held_out: NDArray[np.uint16]) -> float:
    """Return the perplexity on held-out rows."""
    with torch.no_grad():
        parts = [held_out[start : start + 8] for start in range(0, len(held_out), 8)]
        total = sum(loss_of(model, part).item() * len(part) for part in parts)
    return math.exp(total / len(held_out))


class Trainer:
    """A training run: model, optimiser and progress."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer))
        self.config = Config(vocab=self.tokenizer.get_vocab_size())
        self.model = Qwen3(self.config)
        self.optimizers = make_optimizers(self.model, args.rate)
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        if args.out.exists():
            self.load(args.out)
        self.forward = torch.compile(self.model) if args.compile else self.model

    def load(self, path: Path) -> None:
        """Resume from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed"]

    def save(self) -> None:
        """Write a checkpoint. It is renamed into place, so that an incomplete file is never visible."""
        state = {
            "model": self.model.state_dict(), "optimizers": [part.state_dict() for part in self.optimizers],
            "step": self.step, "elapsed": self.elapsed, "config": asdict(self.config),
            "tokens": self.tokens,
        }  # fmt: skip
        part = self.args.out.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.args.out)

    def train_step(self, batch: NDArray[np.uint16], progress: float) -> float:
        """Take one optimiser step and return the loss."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate_at(progress, self.step, self.args.rate)
        with torch.autocast("cpu", torch.bfloat16):  # twice as fast on processors with bfloat16 instructions
            loss = loss_of(self.forward, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += batch[:, 1:].size
        return float(loss.item())

    def report(self, losses: list[float], seconds: float) -> None:
        """Print the mean loss and the speed since the last report."""
        speed = len(losses) * self.args.batch / seconds
        mean = sum(losses) / len(losses)
        print(f"step {self.step} minute {self.elapsed / 60:.1f} loss {mean:.4f} tokens/s {speed:.0f}", flush=True)

    def batch(self, data: tuple[NDArray[np.uint16], ...], progress: float) -> NDArray[np.uint16]:
        """Return the rows of the next step: short rows, or in the last part of the schedule long rows."""
        chosen = data[progress >= 1 - self.args.long_share]
        count = max(1, self.args.batch // (chosen.shape[1] - 1))
        index = self.step * count % (len(chosen) - count)
        batch: NDArray[np.uint16] = chosen[index : index + count]
        return batch

    def run(self, data: tuple[NDArray[np.uint16], ...], held_out: NDArray[np.uint16]) -> None:
        """Train to the end of the schedule."""
        args, losses = self.args, list[float]()
        start = last = saved = time.monotonic()
        before = self.elapsed
        while True:
            progress = max(self.step / args.steps, self.elapsed / 60 / args.minutes)
            if progress >= 1:
                break
            losses.append(self.train_step(self.batch(data, progress), progress))
            now = time.monotonic()
            self.elapsed = before + now - start
            if self.step % LOG_EVERY == 0:
                self.report(losses, now - last)
                losses, last = [], now
            if now - saved > SAVE_SECONDS:
                self.save()
                print(f"held-out perplexity {perplexity(self.model, held_out[:8]):.4f}", flush=True)
                saved = time.monotonic()
                last += saved - now  # do not count saving as training time
        self.save()
        print(f"end: step {self.step}, held-out perplexity {perplexity(self.model, held_out):.4f}", flush=True)


def main() -> None:
    """Prepare the rows and train."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    data = training_rows(args, trainer.tokenizer, trainer.config.context)
    held_out = rows(trainer.tokenizer, HELD_OUT_SEED, 1000, trainer.config.context)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{parameters} parameters, {sum(part.size for part in data)} training tokens, {len(held_out)} held-out rows",
        flush=True,
    )
    trainer.run(data, held_out)


if __name__ == "__main__":
    main()
