"""A made-up byte-level BPE vocabulary of any size, which can encode and decode any text."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

ENDS = ["<|endoftext|>", "<|im_end|>"]


def tokens_and_merges(size: int) -> tuple[list[str], list[str]]:
    """Return `size` tokens (256 bytes, byte pairs and triples, two end tokens) and the merges that produce them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    pairs = (f"{a} {b}" for a, b in itertools.product(letters, letters))
    triples = (f"{a}{b} {c}" for a, b, c in itertools.product(letters, letters, letters))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - 256 - len(ENDS)))
    return [*letters, *(merge.replace(" ", "") for merge in merges), *ENDS], merges


def gguf_metadata(size: int) -> dict[str, object]:
    """Return the vocabulary as GGUF metadata."""
    tokens, merges = tokens_and_merges(size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (size - 2) + [3, 3], dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def tokenizer_json(size: int) -> dict[str, Any]:
    """Return the vocabulary as the contents of a tokenizer.json."""
    tokens, merges = tokens_and_merges(size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = range(size - len(ENDS), size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in ends],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
