"""Convert a `tokenizer.json` to GGUF metadata, or raise an error: the ids of every text must stay the same.

Three properties have no GGUF key and are dropped, as in other converters: Unicode normalisation to form C (Qwen); that
U+2581 in a text for SPM is not a space; and how text around a spelled special token is split.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.convert.tokenizer_models import byte_level, refused, spm
from mlx_engine.tokenizer.gguf import from_gguf
from mlx_engine.tokenizer.hf import parse, tokenizer_json
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, TokenType, Vocabulary

# Keys for end tokens other than `eos` that are not recognised by their text.
MORE_ENDS = ("eot", "eom")


def to_gguf(path: Path, vocab_size: int) -> dict[str, object]:
    """Return the `tokenizer.*` metadata for a model with `vocab_size` embedding rows.

    Raises:
        SourceError: the file cannot be read.
        TokenizerError: the file is not a tokenizer, or GGUF cannot represent it.
    """
    vocabulary, core = parse(tokenizer_json(path.parent))
    file = json.loads(core.to_str())
    vocabulary = _fitted(_said(vocabulary, file), vocab_size)
    how = byte_level(vocabulary, file) if vocabulary.kind == "byte-level BPE" else spm(vocabulary, file)
    return _with_ends(vocabulary, {**how, **_roles(vocabulary)})


def _said(vocabulary: Vocabulary, file: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary with added tokens adapted to GGUF, which matches them in unnormalised text."""
    types = vocabulary.types.copy()
    for added in file["added_tokens"]:
        taken = [flag for flag in ("single_word", "lstrip", "rstrip") if added[flag]]
        if taken:
            raise refused(vocabulary, f"token {added['content']!r}", "found as it stands", taken[0])
        token_id = added["id"]
        if vocabulary.kind == "SPM" and types[token_id] == TokenType.USER_DEFINED and SPACE_MARK in added["content"]:
            if added["normalized"]:
                raise refused(vocabulary, f"token {added['content']!r}", "looked for in text as it is", "normalized")
            # Unnormalised text has no such mark; merges produce the token of spaces.
            types[token_id] = TokenType.NORMAL
    return replace(vocabulary, types=types)


def _fitted(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return the vocabulary with one token per embedding row, padded or cut. Text tokens are never cut."""
    tokens, types = vocabulary.tokens[:size], vocabulary.types[:size]
    beyond = [vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.NORMAL, TokenType.BYTE) if i >= size]
    if beyond:
        raise refused(vocabulary, "every token of text", f"one of the model's {size:,}", repr(beyond[0]))
    tokens += [""] * (size - len(tokens))
    types = np.concatenate([types, np.full(size - len(types), TokenType.UNUSED, np.int8)])
    # GGUF finds ids by their text, so every id needs a unique text.
    tokens = [token or f"[PAD{i}]" for i, token in enumerate(tokens)]
    if len({*tokens}) < size:
        raise refused(vocabulary, "every token", "unique", "a token with the name of a padding token, [PADn]")
    return replace(vocabulary, tokens=tokens, types=types)


def _roles(vocabulary: Vocabulary) -> dict[str, object]:
    unknown = next(iter(vocabulary.ids_of(TokenType.UNKNOWN)), None)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unknown": unknown, "padding": vocabulary.pad_id}
    roles: dict[str, object] = {
        f"tokenizer.ggml.{role}_token_id": token_id
        for role, token_id in ids.items()
        if token_id is not None and token_id < len(vocabulary.tokens)
    }
    roles["tokenizer.ggml.add_bos_token"] = vocabulary.add_bos
    if vocabulary.chat_template is not None:
        roles["tokenizer.chat_template"] = vocabulary.chat_template
    return roles


def _with_ends(vocabulary: Vocabulary, metadata: dict[str, object]) -> dict[str, object]:
    """Read the metadata back to find errors now, and add keys for end tokens that would not be recognised."""
    known = from_gguf(metadata, where=vocabulary.where).eog_ids
    missed = sorted(i for i in vocabulary.eog_ids - known if i < len(vocabulary.tokens))
    if len(missed) > len(MORE_ENDS):
        raise refused(vocabulary, "ends of a text", f"at most {len(MORE_ENDS)} without a usual name", missed)
    keys = (f"tokenizer.ggml.{name}_token_id" for name in MORE_ENDS)
    return metadata | dict(zip(keys, missed, strict=False))
