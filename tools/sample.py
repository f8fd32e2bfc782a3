"""Generate text with the PyTorch model, to check on the training."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from tools.qwen3_torch import Qwen3

STOPS = ("<|endoftext|>", "<|im_end|>")


def greedy_ids(model: Qwen3, prompt: list[int], stops: set[int], limit: int) -> list[int]:
    """Return greedy tokens up to and including the first stop token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit and len(tokens) < model.config.context:
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def greedy(model: Qwen3, tokenizer: Tokenizer, prompt: str, limit: int = 300) -> str:
    """Return the prompt with its greedy continuation, special tokens included."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    vocabulary = tokenizer.get_vocab()
    stops = {vocabulary[token] for token in STOPS}
    more = greedy_ids(model, ids, stops, limit)
    return str(tokenizer.decode(ids + more, skip_special_tokens=False))
