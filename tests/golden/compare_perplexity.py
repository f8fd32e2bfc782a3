"""Compare perplexities with transformers in float64: `python -m tests.golden.compare_perplexity TEXT MODEL...`.

Needs torch, transformers and gguf. Each MODEL is a GGUF file, whose weights transformers dequantises, or a folder.
The windows are those of Hugging Face's guide. A line for each model has both perplexities and their relative
difference; exits with 1 if one is more than 1e-4.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import mlx_engine
from mlx_engine.bench.perplexity import Text, measure

TOLERANCE = 1e-4


def expected(path: Path, text: Text) -> list[float]:
    """Return the log-probability of each token that the guide's loop scores."""
    folder, file = (path.parent, path.name) if path.is_file() else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, attn_implementation="eager")
    model, found, before = model.to(torch.float64).eval(), [], 0
    for begin in range(0, len(text.ids), text.stride):
        end = min(begin + text.context, len(text.ids))
        new, ids = end - before, torch.tensor([text.ids[begin:end]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, :-1].double(), dim=1)
        every = scores.gather(1, ids[0, 1:, None])[:, 0]
        found += every[max(0, end - begin - new - 1) :].tolist()
        before = end
        if end == len(text.ids):
            break
    return found


def main() -> int:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    given, worst = parser.parse_args(), 0.0
    for path in given.models:
        with mlx_engine.load(path) as engine:
            text = Text(engine.prompt_ids(given.text.read_text()), given.context, given.stride)
            found = measure(engine, text)
        want = expected(path, text)
        assert len(want) == len(found.logprobs), (len(want), len(found.logprobs))
        ours, theirs = found.summary()["perplexity"], math.exp(-float(np.mean(want)))
        worst, single = max(worst, abs(ours / theirs - 1)), float(np.abs(np.subtract(want, found.logprobs)).max())
        print(
            f"{path.name}: ours {ours:.9g}, transformers {theirs:.9g}, relative difference {ours / theirs - 1:.1e}; "
            f"of {len(want):,} tokens the largest difference of a log-probability is {single:.1e}",
            flush=True,
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
