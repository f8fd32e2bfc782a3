"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.tokenizer.bpe import byte_level_bpe
from mlx_engine.tokenizer.metadata import Metadata
from mlx_engine.tokenizer.special import END_KEYS, END_NAMES, TokenType, named_end_ids
from mlx_engine.tokenizer.split import SPLITS
from mlx_engine.tokenizer.spm import spm
from mlx_engine.tokenizer.tokenizer import Tokenizer, mark_special
from mlx_engine.tokenizer.vocabulary import BYTE_TOKEN, SPACE_MARK, Kind, SpacePrefix, Vocabulary, type_array

_log = logging.getLogger(__name__)
_KINDS: dict[str, Kind] = {"gpt2": "byte-level BPE", "llama": "SPM"}


def from_gguf(metadata: Mapping[str, object], *, where: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes; `where` names the file in errors.

    Where the metadata leaves room, llama.cpp decides: what the names of pre-tokenizers stand for, that a file
    without one gets `default` and a warning, that tokens known to end a generation are control tokens whatever
    their type says, and that SPM wants a BOS, a space before the text, and ids 1, 2 and 0 for BOS, EOS and
    unknown unless the file says otherwise.

    Raises:
        TokenizerError: the metadata has no tokenizer, one of a kind that is not implemented, or one that
            contradicts itself.

    Source: llama.cpp src/llama-vocab.cpp, `llama_vocab::impl::load`, at 00ad355e.
    """
    read = Metadata(metadata, where)
    model = read.text("tokenizer.ggml.model")
    if model not in _KINDS:
        raise read.error(
            "tokenizer.ggml.model",
            " or ".join(f"{name!r} ({kind})" for name, kind in _KINDS.items()),
            "nothing" if model is None else repr(model),
            "the file has no tokenizer, or one of a kind that is not implemented here",
        )
    return _byte_level(read) if _KINDS[model] == "byte-level BPE" else _spm(read)


def _byte_level(read: Metadata) -> Tokenizer:
    pre = read.text("tokenizer.ggml.pre")
    if pre is None:
        pre = "default"
        _log.warning("%s does not say how words are cut (tokenizer.ggml.pre): expect worse text", read.where)
    if pre not in SPLITS:
        raise read.error(
            "tokenizer.ggml.pre", f"one of {', '.join(SPLITS)}", repr(pre), "this pre-tokenizer is not implemented here"
        )
    split = SPLITS[pre]
    vocabulary = _vocabulary(read, "byte-level BPE", pre, add_bos=split.add_bos)
    core = byte_level_bpe(vocabulary, read.strings("tokenizer.ggml.merges"), split)
    mark_special(core, vocabulary)
    return Tokenizer(vocabulary, core)


def _spm(read: Metadata) -> Tokenizer:
    vocabulary = _vocabulary(read, "SPM", read.text("tokenizer.ggml.pre"), add_bos=True)
    n_tokens = len(vocabulary.tokens)
    for token_id in vocabulary.ids_of(TokenType.BYTE):
        if not BYTE_TOKEN.fullmatch(vocabulary.tokens[token_id]):
            text = vocabulary.tokens[token_id]
            raise read.error(f"byte token {token_id:,}", "written <0x00> to <0xFF>", f"{text!r:.40}")
    scores = read.numbers("tokenizer.ggml.scores", count=n_tokens, kinds="fiu")
    if scores is None:
        raise read.error("tokenizer.ggml.scores", f"{n_tokens:,} numbers, one per token", "nothing")
    unknown_id = read.token_id("tokenizer.ggml.unknown_token_id", n_tokens)
    if unknown_id is None and vocabulary.types[0] == TokenType.UNKNOWN:
        unknown_id = 0
    core = spm(vocabulary, scores, unknown_id)
    mark_special(core, vocabulary)
    return Tokenizer(vocabulary, core)


def _vocabulary(read: Metadata, kind: Kind, pre: str | None, *, add_bos: bool) -> Vocabulary:
    tokens = _tokens(read)
    types = _types(read, tokens)
    space_prefix = SpacePrefix.NEVER
    if kind == "SPM":
        for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
            tokens[i] = tokens[i].replace(SPACE_MARK, " ")  # compared with text as it is; newer files say so themselves
        if read.flag("tokenizer.ggml.add_space_prefix") is not False:
            space_prefix = SpacePrefix.SECTION
    ids = {token: token_id for token_id, token in enumerate(tokens) if token}
    bos_id = read.token_id("tokenizer.ggml.bos_token_id", len(tokens))
    eos_id = read.token_id("tokenizer.ggml.eos_token_id", len(tokens))
    if kind == "SPM":
        bos_id = _default(bos_id, 1, types)
        eos_id = _default(eos_id, 2, types)
    asked = read.flag("tokenizer.ggml.add_bos_token")
    if asked and bos_id is None:
        raise read.error("tokenizer.ggml.bos_token_id", "the token that add_bos_token asks for", "nothing")
    ends = {read.token_id(key, len(tokens)) for key in END_KEYS} | {eos_id} | named_end_ids(ids)
    return Vocabulary(
        where=read.where,
        kind=kind,
        tokens=tokens,
        types=types,
        pre=pre,
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=frozenset(i for i in ends if i is not None),
        add_bos=bos_id is not None and (add_bos if asked is None else asked),
        space_prefix=space_prefix,
        chat_template=read.text("tokenizer.chat_template"),
    )


def _default(token_id: int | None, usual: int, types: NDArray[np.int8]) -> int | None:
    """SPM's usual id for a role, where the file does not give one and the token there may have it."""
    if token_id is None and usual < len(types) and types[usual] == TokenType.CONTROL:
        return usual
    return token_id


def _tokens(read: Metadata) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = read.strings(key)
    if not tokens:
        raise read.error(key, "at least one token", "none")
    if len({*tokens}) < len(tokens):
        repeated = [token for token, count in Counter(tokens).items() if count > 1 and token]
        if repeated:
            ids = [i for i, token in enumerate(tokens) if token == repeated[0]]
            raise read.error(key, "different for each id", f"{repeated[0]!r:.40} at {ids[0]:,} and {ids[1]:,}")
    return tokens


def _types(read: Metadata, tokens: list[str]) -> NDArray[np.int8]:
    given: NDArray[Any] | None = read.numbers("tokenizer.ggml.token_type", count=len(tokens), kinds="iu")
    types = np.full(len(tokens), TokenType.NORMAL, np.int8) if given is None else type_array(given)
    for token_id in [i for i, token in enumerate(tokens) if token in END_NAMES]:
        types[token_id] = TokenType.CONTROL
    return types
