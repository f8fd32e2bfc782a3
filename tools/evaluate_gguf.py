"""Evaluate the exported file in PyTorch: perplexity and samples.

``python -m tools.evaluate_gguf --model build/storyteller-q8_0.gguf --tokenizer build/tokenizer.json``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer

from tools.corpus.chat import turn
from tools.dataset import rows
from tools.export_gguf import model_keys, tensor_name
from tools.qwen3_torch import Config, Qwen3
from tools.sample import greedy
from tools.train import HELD_OUT_SEED, perplexity

PROMPTS = (
    "Once upon a time", "One sunny morning,", "There was a little fox", "Tom", "In a small village",
    "The capital of France is", turn("user", "What is the capital of France?") + "<|im_start|>assistant\n",
    turn("user", "Tell me a story about a dragon.") + "<|im_start|>assistant\n",
    turn("user", "Who are you?") + "<|im_start|>assistant\n",
)  # fmt: skip


def read_config(reader: gguf.GGUFReader) -> Config:
    """Read the model's sizes from the file's metadata."""
    names = dict(zip(model_keys(Config()), ("layers", "context", "hidden", "ffn", "heads", "kv_heads",
                                            "head_dim", "head_dim", "eps", "theta"), strict=True))  # fmt: skip
    shape = {field: reader.fields[f"qwen3.{key}"].contents() for key, field in names.items()}
    return Config(vocab=len(reader.fields["tokenizer.ggml.tokens"].data), **shape)


def read_model(path: Path) -> Qwen3:
    """Fill our model with the file's dequantised weights."""
    reader = gguf.GGUFReader(path)
    model = Qwen3(read_config(reader))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name, weight in model.state_dict().items():
        tensor = stored.pop(tensor_name(name))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        state[name] = torch.from_numpy(values.copy())
    if stored:
        raise ValueError(f"tensors that no weight wants: {sorted(stored)}")
    model.load_state_dict(state)
    return model


def main() -> None:
    """Print the perplexity on fresh documents and some greedy continuations."""
    parser = argparse.ArgumentParser(prog="tools.evaluate_gguf", description="Evaluate the built-in model.")
    parser.add_argument("--model", type=Path, default=Path("build/storyteller-q8_0.gguf"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer.json"))
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--prompt", action="append", help="prompts instead of the usual ones")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model = read_model(args.model)
    for prompt in args.prompt or PROMPTS:
        text = greedy(model, tokenizer, prompt)
        length = len(tokenizer.encode(text).ids) - len(tokenizer.encode(prompt).ids)
        print(f"--- {length} tokens\n{text}\n", flush=True)
    held_out = rows(tokenizer, HELD_OUT_SEED, args.documents, model.config.context)
    print(f"held-out perplexity {perplexity(model, held_out):.4f} on {len(held_out) * model.config.context} tokens")


if __name__ == "__main__":
    main()
