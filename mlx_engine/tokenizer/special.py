"""Token types of GGUF, and the tokens that end a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

END_NAMES = frozenset(
    {
        "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>",
        "<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~[",
        # Fill-in-the-middle: padding, next repository, next file. A code model generates one at the end of a file.
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
"""Token texts that end a generation whatever their type: files often mark only one of these tokens as EOS.

Source: llama.cpp src/llama-vocab.cpp, the end-of-generation list in `llama_vocab::impl::load`, at 00ad355e.
"""

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""GGUF keys, each with the id of one such token."""


class TokenType(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def named_end_ids(ids: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of tokens in `ids` (text to id) whose text marks the end of a generation."""
    names = END_NAMES & ids.keys()
    if {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names:
        names -= {"<|end|>"}  # in these vocabularies it ends a message, but not the turn
    return _ids(names, ids)


def _ids(names: Iterable[str], ids: Mapping[str, int]) -> frozenset[int]:
    return frozenset(ids[name] for name in names)
