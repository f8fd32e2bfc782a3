"""Byte-level BPE: text is split into words, words into bytes, and bytes are merged by the ranks of a merge list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import tokenizers
from tokenizers import models

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.metadata import Metadata
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.special import TokenType
from mlx_engine.tokenizer.split import Split
from mlx_engine.tokenizer.vocabulary import Vocabulary

_KEY = "tokenizer.ggml.merges"


class Merges(Sequence[tuple[str, str]]):
    """The merges of a GGUF file, by rank; of a merge that is listed twice, the first rank counts.

    The file stores each merge as `left right`: tokens contain no space, which byte-level BPE writes as `Ġ`. Merges are
    split on access: the library copies the pairs, and a list of split pairs would take 25 MB more.

    Raises:
        TokenizerError: the file has no merges, or an entry is not a pair.
    """

    def __init__(self, read: Metadata) -> None:
        merges = read.strings(_KEY)
        if {*map(str.count, merges, repeat(" "))} - {1}:
            index = next(i for i, merge in enumerate(merges) if merge.count(" ") != 1)
            raise read.error(f"{_KEY}[{index:,}]", "two tokens with a space between", f"{merges[index]!r:.60}")
        self._read, self._listed, self._known = read, merges, {*merges}
        if len(self._known) < len(merges):
            self._listed = [*dict.fromkeys(merges)]

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(tuple, map(str.split, self._listed, repeat(" ")))  # type: ignore[arg-type]

    def make(self, token: str) -> bool:
        """Return whether a merge produces this token. Trying all its splits is faster than searching all merges."""
        return any(f"{token[:i]} {token[i:]}" in self._known for i in range(1, len(token)))

    def check(self, ids: dict[str, int]) -> None:
        """Check that every merge produces a token. The library checks this too, but does not report which merge fails.

        Raises:
            TokenizerError: a merge produces no token.
        """
        for index, merge in enumerate(self._read.strings(_KEY)):
            if merge.replace(" ", "") not in ids:
                expected = "two tokens of the vocabulary that make a third"
                raise self._read.error(f"{_KEY}[{index:,}]", expected, f"{merge!r:.60}, which makes none") from None


def byte_level_bpe(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges, split: Split) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges bytes into the tokens of `vocabulary`, without special tokens.

    Unlike some models' own tokenizers it does not normalise text: GGUF has no key for normalisation, and `decode` then
    returns exactly the text given to `encode`. No merge produces a control token, so that its spelling in plain text
    stays text.

    Raises:
        TokenizerError: a merge does not join two tokens into a third.
    """
    try:
        with refusals(vocabulary.where, f"expected {_KEY} to join tokens of the vocabulary, found others"):
            pairs = without_control(vocabulary, ids, merges)
            core = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole_words))
            core.pre_tokenizer = split.pre_tokenizer()
    except TokenizerError:
        merges.check(ids)
        raise
    return core


def without_control(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges) -> Sequence[tuple[str, str]]:
    """Return the merges that neither produce nor read a control token, so that its spelling in plain text stays text.

    Raises:
        TokenizerError: some do, and a merge produces no token.
    """
    kept = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)
    unmade = {vocabulary.tokens[i] for i in kept}
    if not any(map(merges.make, unmade)):
        return merges
    merges.check(ids)  # the library does not see the merges left out below
    return [pair for pair in merges if unmade.isdisjoint({*pair, "".join(pair)})]
