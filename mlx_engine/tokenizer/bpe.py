"""Byte-level BPE: text is cut into words, a word into bytes, and bytes are merged in the order of a list."""

from __future__ import annotations

import tokenizers
from tokenizers import models

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.metadata import CONVERT_AGAIN
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.special import TokenType
from mlx_engine.tokenizer.split import Split
from mlx_engine.tokenizer.vocabulary import Vocabulary


def byte_level_bpe(vocabulary: Vocabulary, merges: list[str], split: Split) -> tokenizers.Tokenizer:
    """A tokenizer that merges bytes into the tokens of `vocabulary`; special tokens are not yet told apart.

    Unlike some models' own tokenizers it does not normalise: a GGUF file has no room to say so, and text comes back
    from `decode` as it went into `encode`.

    No merge makes a control token: the plain text of one stays text.

    Raises:
        TokenizerError: a merge is not two tokens that make a third.
    """
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}
    pairs = _pairs(merges, ids, vocabulary.where)
    unmade = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)
    names = {vocabulary.tokens[i] for i in unmade}
    if not names.isdisjoint(map("".join, pairs)):
        pairs = [pair for pair in pairs if names.isdisjoint({*pair, "".join(pair)})]
    with refusals(vocabulary.where, "tokens and merges do not make a vocabulary"):
        core = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole_words))
        core.pre_tokenizer = split.pre_tokenizer()
    return core


def _pairs(merges: list[str], ids: dict[str, int], where: str) -> list[tuple[str, str]]:
    """`left right` split at its space: no token has one, since a space is written as another character."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if {*map(len, pairs)} - {2}:
        index = next(i for i, pair in enumerate(pairs) if len(pair) != 2)
        raise TokenizerError(
            f"{where}: expected tokenizer.ggml.merges[{index:,}] to be two tokens with a space between, "
            f"found {merges[index]!r:.60}; {CONVERT_AGAIN}"
        )
    unknown = {part for pair in pairs for part in pair} - ids.keys() or {*map("".join, pairs)} - ids.keys()
    if unknown:
        index = next(i for i, pair in enumerate(pairs) if unknown & {*pair, "".join(pair)})
        token = min(unknown & {*pairs[index], "".join(pairs[index])})
        raise TokenizerError(
            f"{where}: expected tokenizer.ggml.merges[{index:,}] to name tokens of the vocabulary, "
            f"found {merges[index]!r:.60}, where {token!r:.40} is none; {CONVERT_AGAIN}"
        )
    return pairs  # type: ignore[return-value]  # each has two parts, as checked above
