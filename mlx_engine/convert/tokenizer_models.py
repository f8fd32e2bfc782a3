"""GGUF metadata of a tokenizer.json's model, byte-level BPE or SPM. Settings that GGUF cannot represent are refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_engine.convert.spm_scores import scores
from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.bpe import name_of
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, SpacePrefix, TokenType, Vocabulary

MARK = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
PREPEND = {"type": "Prepend", "prepend": SPACE_MARK}
# After spaces are replaced, there are none left to split at.
NO_CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def refused(vocabulary: Vocabulary, what: str, expected: str, found: object) -> TokenizerError:
    """Return the error for a tokenizer that GGUF cannot represent; `what` names the setting."""
    return TokenizerError(
        f"{vocabulary.where}: expected {what} to be {expected}, found {found!s:.120}; GGUF cannot store this, so the "
        "file would give other ids: quantise the folder on load instead, with --quant"
    )


def byte_level(vocabulary: Vocabulary, file: dict[str, Any]) -> dict[str, object]:
    """Return the metadata of a byte-level BPE: pre-tokenizer, tokens and merges.

    Raises:
        TokenizerError: GGUF cannot represent a setting.
    """
    model = file["model"]
    _check_model(vocabulary, model, byte_fallback=False)
    if file["normalizer"] not in (None, {"type": "NFC"}):
        raise refused(vocabulary, "normalizer", "NFC, or none", file["normalizer"])
    pre = name_of(file["pre_tokenizer"], whole_words=bool(model["ignore_merges"]))
    if pre is None:
        raise refused(vocabulary, "pre_tokenizer", "one that GGUF has a name for", file["pre_tokenizer"])
    merges = [" ".join(pair) for pair in model["merges"]]
    if len({*merges}) < len(merges) or any(merge.count(" ") != 1 for merge in merges):
        raise refused(vocabulary, "merges", "pairs without spaces, each listed once", "others")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        **_tokens(vocabulary),
        "tokenizer.ggml.merges": merges,
    }


def spm(vocabulary: Vocabulary, file: dict[str, Any]) -> dict[str, object]:
    """Return the metadata of an SPM: tokens, and scores that give the same merges.

    Raises:
        TokenizerError: GGUF cannot represent a setting.
    """
    _check_model(vocabulary, file["model"], byte_fallback=True)
    if file["model"]["ignore_merges"]:
        raise refused(vocabulary, "ignore_merges", "false", "true")
    prefixes = {SpacePrefix.NEVER: [MARK], SpacePrefix.SECTION: [PREPEND, MARK]}
    steps = file["normalizer"] or {}
    steps = steps.get("normalizers", [steps])
    if steps != prefixes.get(vocabulary.space_prefix):
        raise refused(vocabulary, "normalizer", f"spaces to {SPACE_MARK}, with or without one before", steps)
    if file["pre_tokenizer"] not in (None, NO_CUT):
        raise refused(vocabulary, "pre_tokenizer", "none", file["pre_tokenizer"])
    if len(vocabulary.ids_of(TokenType.BYTE)) < 256:
        raise refused(vocabulary, "byte tokens", "256", len(vocabulary.ids_of(TokenType.BYTE)))
    merges = [tuple(pair) for pair in file["model"]["merges"]]
    values = scores(vocabulary.where, vocabulary.tokens, vocabulary.ids_of(TokenType.NORMAL), merges)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        **_tokens(vocabulary),
        "tokenizer.ggml.scores": np.array(values, np.float32),
        "tokenizer.ggml.add_space_prefix": vocabulary.space_prefix is SpacePrefix.SECTION,
    }


def _check_model(vocabulary: Vocabulary, model: dict[str, Any], *, byte_fallback: bool) -> None:
    if model["type"] != "BPE":
        raise refused(vocabulary, "the model", "BPE", model["type"])
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[key]:
            raise refused(vocabulary, key, "absent", model[key])
    if model["byte_fallback"] != byte_fallback:
        raise refused(vocabulary, "byte_fallback", str(byte_fallback).lower(), model["byte_fallback"])


def _tokens(vocabulary: Vocabulary) -> dict[str, object]:
    return {
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types.astype(np.int32),
    }
