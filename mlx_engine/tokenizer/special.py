"""What a token is for: its type in a GGUF file, and which tokens end a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

END_NAMES = frozenset(
    {
        "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>",
        "<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~[",
        # Fill-in-the-middle: padding, next repository, next file. A code model that writes one has finished its file.
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
"""Texts whose token ends a generation whatever its type says: files often mark only one of them as EOS.

Source: llama.cpp src/llama-vocab.cpp, the end-of-generation list in `llama_vocab::impl::load`, at 00ad355e.
"""

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""GGUF keys that name one such token each."""


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
    """Ids of the tokens in `ids` (text -> id) that end a generation by their name alone."""
    names = END_NAMES & ids.keys()
    if {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names:
        names -= {"<|end|>"}  # in these vocabularies it ends a message, and the turn goes on
    return _ids(names, ids)


def _ids(names: Iterable[str], ids: Mapping[str, int]) -> frozenset[int]:
    return frozenset(ids[name] for name in names)
