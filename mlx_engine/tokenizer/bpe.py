"""Byte-level BPE: text is cut into words, a word into bytes, and bytes are merged in the order of a list."""

from __future__ import annotations

from itertools import repeat
from operator import add, contains
from typing import NamedTuple

import tokenizers
from tokenizers import models

from mlx_engine.tokenizer.metadata import Metadata
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.special import TokenType
from mlx_engine.tokenizer.split import Split
from mlx_engine.tokenizer.vocabulary import Vocabulary

_KEY = "tokenizer.ggml.merges"


class Merges(NamedTuple):
    """Pairs of neighbours, the most urgent first, and all that they become."""

    pairs: list[tuple[str, str]]
    made: set[str]


def read_merges(read: Metadata, ids: dict[str, int]) -> Merges:
    """The merges of a GGUF file, each `left right`: tokens have no space, which byte-level BPE writes as `Ġ`.

    Raises:
        TokenizerError: there are none, or one is not two texts that make a token of `ids`.
    """
    merges = read.strings(_KEY)
    parts = " ".join(merges).split(" ") if merges else []
    if len(parts) != 2 * len(merges) or not all(map(contains, merges, repeat(" "))):
        index = next(i for i, merge in enumerate(merges) if merge.count(" ") != 1)
        raise read.error(f"{_KEY}[{index:,}]", "two tokens with a space between", f"{merges[index]!r:.60}")
    left, right = parts[::2], parts[1::2]
    made = [*map(add, left, right)]
    if not all(map(ids.__contains__, made)):
        index = next(i for i, token in enumerate(made) if token not in ids)
        expected = "two tokens of the vocabulary that make a third"
        raise read.error(f"{_KEY}[{index:,}]", expected, f"{merges[index]!r:.60}, which makes none")
    pairs, results = [*zip(left, right, strict=True)], {*made}
    if len(results) < len(pairs):
        pairs = [*dict.fromkeys(pairs)]  # a pair that is listed twice counts where it first stands
    return Merges(pairs, results)


def byte_level_bpe(vocabulary: Vocabulary, merges: Merges, split: Split) -> tokenizers.Tokenizer:
    """A tokenizer that merges bytes into the tokens of `vocabulary`; special tokens are not yet told apart.

    Unlike some models' own tokenizers it does not normalise: a GGUF file has no room to say so, and text comes back
    from `decode` as it went into `encode`. No merge makes a control token, so that the plain text of one stays text.
    """
    kept = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)
    unmade = {vocabulary.tokens[i] for i in kept}
    pairs = merges.pairs
    if not unmade.isdisjoint(merges.made):
        pairs = [pair for pair in pairs if unmade.isdisjoint({*pair, "".join(pair)})]
    with refusals(vocabulary.where, f"expected {_KEY} to join tokens of the vocabulary, found others"):
        core = tokenizers.Tokenizer(models.BPE(vocabulary.ids, pairs, ignore_merges=split.whole_words))
        core.pre_tokenizer = split.pre_tokenizer()
    return core
