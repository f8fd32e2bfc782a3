"""Build a tokenizer from GGUF metadata."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mlx_engine.tokenizer.bpe import SPLITS, Merges, byte_level_bpe, character_bpe, spm
from mlx_engine.tokenizer.tokenizer import Tokenizer, mark_special
from mlx_engine.tokenizer.vocabulary import (
    BYTE_TOKEN,
    END_KEYS,
    END_NAMES,
    SPACE_MARK,
    Kind,
    Metadata,
    SpacePrefix,
    TokenType,
    Vocabulary,
    named_end_ids,
    type_array,
)

_log = logging.getLogger(__name__)
# Maps each value of `tokenizer.ggml.model` to the kind of vocabulary. Gemma 4's tokens are spelled as in SPM, but are
# merged by a merge list and not by scores.
_KINDS: dict[str, Kind] = {"gpt2": "byte-level BPE", "llama": "SPM", "gemma4": "SPM"}
_TOKENS = "tokenizer.ggml.tokens"


def from_gguf(metadata: Mapping[str, object], *, where: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes; `where` names the file in errors.

    Names of pre-tokenizers, the texts of end tokens, and missing keys are interpreted as in llama.cpp. If the file
    names no pre-tokenizer, byte-level BPE uses `default`, with a warning. SPM has these defaults for missing keys: a
    BOS and a space are added before the text, and BOS, EOS and unknown are ids 1, 2 and 0, if these tokens have the
    right types.

    If merges of byte-level BPE produce a normal token that is spelled like an end token, the token stays normal, unlike
    in llama.cpp. Qwen has such a token, `</s>`.

    Raises:
        TokenizerError: the metadata has no tokenizer, an inconsistent one, or one that is not implemented.
        ChatTemplateError: the chat template is too large.

    Source: llama.cpp src/llama-vocab.cpp, `llama_vocab::impl::load`, at 00ad355e.
    """
    read = Metadata(metadata, where)
    model = read.text("tokenizer.ggml.model")
    if model not in _KINDS:
        raise read.error(
            "tokenizer.ggml.model",
            " or ".join(f"{name!r} ({kind})" for name, kind in _KINDS.items()),
            "nothing" if model is None else f"{model!r:.40}",
            "the file has no tokenizer, or one of a kind that is not implemented here",
        )
    return {"gpt2": _byte_level, "llama": _spm, "gemma4": _gemma4}[model](read)


def _byte_level(read: Metadata) -> Tokenizer:
    pre = read.text("tokenizer.ggml.pre")
    if pre is None:
        pre = "default"
        _log.warning("%s does not name its pre-tokenizer (tokenizer.ggml.pre): answers may be worse", read.where)
    if pre not in SPLITS:
        expected, hint = f"one of {', '.join(SPLITS)}", "this pre-tokenizer is not implemented here"
        raise read.error("tokenizer.ggml.pre", expected, f"{pre!r:.40}", hint)
    split = SPLITS[pre]
    tokens = read.strings(_TOKENS)
    ids = _ids(read, tokens)
    merges = Merges(read)
    ends = [ids[name] for name in END_NAMES if name in ids]
    types = _types(read, len(tokens), ends, text=[i for i in ends if merges.make(tokens[i])])
    vocabulary = _vocabulary(read, tokens, types, kind="byte-level BPE", pre=pre, add_bos=split.add_bos)
    core = byte_level_bpe(vocabulary, ids, merges, split)
    mark_special(core, vocabulary)
    return Tokenizer(vocabulary, core)


def _spm(read: Metadata) -> Tokenizer:
    tokens = read.strings(_TOKENS)
    types = _types(read, len(tokens), [i for i, token in enumerate(tokens) if token in END_NAMES])
    for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        # User-defined tokens are matched against unnormalised text, so U+2581, which some files write, becomes a space.
        tokens[i] = tokens[i].replace(SPACE_MARK, " ")
    _check_bytes(read, tokens, types)
    scores = read.numbers("tokenizer.ggml.scores", count=len(tokens), kinds="fiu")
    if scores is None:
        raise read.error("tokenizer.ggml.scores", f"{len(tokens):,} numbers, one per token", "nothing")
    pre = read.text("tokenizer.ggml.pre")
    ids = _ids(read, tokens)
    vocabulary = _vocabulary(read, tokens, types, kind="SPM", pre=pre, add_bos=True, has_usual=True)
    unknown_id = read.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    core = spm(vocabulary, ids, scores, _usual(unknown_id, 0, TokenType.UNKNOWN, types))
    mark_special(core, vocabulary)
    return Tokenizer(vocabulary, core)


def _gemma4(read: Metadata) -> Tokenizer:
    """Build the tokenizer of Gemma 4.

    As in llama.cpp, a BOS is added even if `add_bos_token` is false, and no space is added before the text.
    """
    tokens = read.strings(_TOKENS)
    types = _types(read, len(tokens), [i for i, token in enumerate(tokens) if token in END_NAMES])
    _check_bytes(read, tokens, types)
    ids = _ids(read, tokens)
    vocabulary = _vocabulary(read, tokens, types, kind="SPM", pre=None, add_bos=True)
    vocabulary = replace(vocabulary, add_bos=vocabulary.bos_id is not None)
    unknown_id = read.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    core = character_bpe(vocabulary, ids, Merges(read), unknown_id)
    mark_special(core, vocabulary)
    return Tokenizer(vocabulary, core)


def _check_bytes(read: Metadata, tokens: list[str], types: NDArray[np.int8]) -> None:
    for i in np.flatnonzero(types == TokenType.BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(tokens[i]):
            raise read.error(f"{_TOKENS}[{i:,}], a byte token,", "written <0x00> to <0xFF>", f"{tokens[i]!r:.40}")


def _vocabulary(
    read: Metadata,
    tokens: list[str],
    types: NDArray[np.int8],
    *,
    kind: Kind,
    pre: str | None,
    add_bos: bool,
    has_usual: bool = False,
) -> Vocabulary:
    """Return the vocabulary; `add_bos` is the default of the key `add_bos_token`.

    With `has_usual`, missing keys of BOS, EOS and the space before the text have SPM's defaults.
    """
    bos_id = read.token_id("tokenizer.ggml.bos_token_id", len(tokens))
    eos_id = read.token_id("tokenizer.ggml.eos_token_id", len(tokens))
    space_prefix = SpacePrefix.NEVER
    if has_usual:
        bos_id = _usual(bos_id, 1, TokenType.CONTROL, types)
        eos_id = _usual(eos_id, 2, TokenType.CONTROL, types)
        if read.flag("tokenizer.ggml.add_space_prefix") is not False:
            space_prefix = SpacePrefix.SECTION
    asked = read.flag("tokenizer.ggml.add_bos_token")
    if asked and bos_id is None:
        raise read.error("tokenizer.ggml.bos_token_id", "the id of a token, because add_bos_token is set", "nothing")
    text_ends = (eos_id,) if read.flag("tokenizer.ggml.add_eos_token") and eos_id is not None else ()
    control = {tokens[i]: i for i in np.flatnonzero(types == TokenType.CONTROL).tolist()}
    eog_ids = {read.token_id(key, len(tokens)) for key in END_KEYS} | {eos_id} | named_end_ids(control)
    return Vocabulary(
        where=read.where,
        kind=kind,
        tokens=tokens,
        types=types,
        pre=pre,
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=frozenset(i for i in eog_ids if i is not None),
        add_bos=bos_id is not None and (add_bos if asked is None else asked),
        ends=text_ends,
        space_prefix=space_prefix,
        chat_template=read.text("tokenizer.chat_template"),
    )


def _usual(token_id: int | None, usual: int, role: TokenType, types: NDArray[np.int8]) -> int | None:
    """Return SPM's default id `usual` if `token_id` is None and token `usual` has the type `role`; else `token_id`."""
    return usual if token_id is None and usual < len(types) and types[usual] == role else token_id


def _ids(read: Metadata, tokens: list[str]) -> dict[str, int]:
    """Return a map from each token to its id, without empty tokens, because no text encodes to them."""
    if not tokens:
        raise read.error(_TOKENS, "at least one token", "none")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        for token_id, token in enumerate(tokens):
            if token and ids[token] != token_id:
                raise read.error(_TOKENS, "different for each id", f"{token!r:.40} at {token_id:,} and {ids[token]:,}")
    ids.pop("", None)
    return ids


def _types(read: Metadata, count: int, ends: Iterable[int], text: Container[int] = ()) -> NDArray[np.int8]:
    """Return the token types of the file; if the file has no types, all tokens are normal.

    Tokens in `ends` become control tokens, except normal tokens that are also in `text`.
    """
    given = read.numbers("tokenizer.ggml.token_type", count=count, kinds="iu")
    types = np.full(count, TokenType.NORMAL, np.int8) if given is None else type_array(given)
    for token_id in ends:
        if types[token_id] != TokenType.NORMAL or token_id not in text:
            types[token_id] = TokenType.CONTROL
    return types
