"""Lookup: proposes the tokens that followed the last tokens of a sequence where they occurred before.

A `Text` is token ids in which earlier occurrences are found: for each pair of neighbouring ids it has a chain of the
places where the pair occurs, as in LZ77 with hash chains. A search compares the last ids of a sequence with at most
`CANDIDATES` places, each over at most `LONGEST` ids, so its time is bounded for every text. While the sequence
continues in the same way as the text, the match becomes longer and no search is needed. A text takes 12 to 16 bytes per
token.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from mlx_engine.loop import request as loop_request

# The most places that a search compares, in each text, and the most ids of each.
CANDIDATES, LONGEST = 8, 32
# The number of ids in a key. A single id predicts the next one badly.
KEY = 2
# Buckets of a text: a power of two, at least as many as ids.
FEWEST = 64
_MULTIPLIER = 0x9E3779B1
# The most ids of other sequences that are kept, and an id that ends each of them.
MOST_OTHERS, END = 1 << 18, -1


class Match(NamedTuple):
    """An earlier occurrence of the last `length` ids of a sequence, which ends before index `end` of a text."""

    text: Text
    end: int
    length: int


class Text:
    """Token ids that grow at their end, and the places of each pair of ids.

    Attributes:
        ids: the ids.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        """Index ids, all at once."""
        self.ids = array("i", ids)
        self._index()

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and of the index."""
        return sum(of.itemsize * len(of) for of in (self.ids, self._before, self._newest))

    def append(self, token: int) -> None:
        """Append an id: constant time, apart from the times when the index doubles."""
        ids = self.ids
        ids.append(token)
        n = len(ids)
        if n > len(self._newest):
            self._index()
        elif n < KEY:
            self._before.append(-1)
        else:
            bucket = (ids[-2] * _MULTIPLIER ^ token) * _MULTIPLIER >> 7 & self._mask
            self._before.append(self._newest[bucket])
            self._newest[bucket] = n

    def longest(self, last: Sequence[int]) -> tuple[int, int]:
        """Return the end and the length of the longest occurrence of the last ids of `last` (at least two ids).

        At least one id follows the occurrence. Of several occurrences with the same length, return the last. Return
        (0, 0) if the last `CANDIDATES` places of the last pair have no occurrence.
        """
        ids, n = self.ids, len(self.ids)
        a, b = last[-2], last[-1]
        end, found, length = self._newest[(a * _MULTIPLIER ^ b) * _MULTIPLIER >> 7 & self._mask], 0, 0
        for _ in range(CANDIDATES):
            if end < KEY:
                break
            if end < n:
                agreeing = _agreeing(ids, end, last)
                if agreeing > length:
                    found, length = end, agreeing
            end = self._before[end - 1]
        return (found, length) if length >= KEY else (0, 0)

    def _index(self) -> None:
        """Make the index of all ids: `_newest[bucket]` is the end of its last pair, `_before[end - 1]` the one before.

        An end is an index after a pair; -1 stands for none.
        """
        n, size = len(self.ids), FEWEST
        while size < n + 1:
            size *= 2
        self._mask, self._newest, self._before = size - 1, array("i", [-1]) * size, array("i", [-1]) * n
        if n < KEY:
            return
        newest, before, mask, a = self._newest, self._before, self._mask, self.ids[0]
        for end in range(KEY, n + 1):
            b = self.ids[end - 1]
            bucket = (a * _MULTIPLIER ^ b) * _MULTIPLIER >> 7 & mask
            before[end - 1], newest[bucket], a = newest[bucket], end, b


def _agreeing(ids: Sequence[int], end: int, last: Sequence[int]) -> int:
    """Return how many ids before `end` agree with the last ids of `last`, at most `LONGEST`."""
    n, most = 0, min(end, len(last), LONGEST)
    while n < most and ids[end - 1 - n] == last[-1 - n]:
        n += 1
    return n


class Lookup:
    """The drafter of one sequence.

    The ids of the answer are a text that grows; the prompt and the other texts do not change, and may be shared.
    """

    def __init__(self, prompt: Text, others: Sequence[Text] = ()) -> None:
        self._answer, self._prompt = Text(), prompt
        # In this order, the first of several longest matches is taken.
        self._texts = [self._answer, prompt, *others]
        self._match = Match(self._answer, 0, 0)

    def extend(self, ids: Sequence[int]) -> None:
        """Append new ids of the answer, in constant time for each id."""
        for token in ids:
            text, end, length = self._match
            goes_on = bool(length) and end < len(text.ids) and text.ids[end] == token
            self._answer.append(token)
            self._match = Match(text, end + 1, length + 1) if goes_on else self._longest()

    def propose(self, most: int) -> tuple[Sequence[int], int]:
        """Return at most `most` ids that may follow, and how many of the last ids agree with the occurrence."""
        text, end, length = self._match
        if not length:
            return (), 0
        found = text.ids[end : end + most].tolist()
        if text is self._answer:  # the occurrence may overlap the end of the answer: it then repeats itself
            period = len(found)
            found += [found[i % period] for i in range(period, most)]
        return found, min(length, LONGEST)

    def _longest(self) -> Match:
        """Return the longest occurrence of the last ids in any text."""
        last, best = self._last(), Match(self._answer, 0, 0)
        for text in self._texts if len(last) >= KEY else ():
            end, length = text.longest(last)
            if length > best.length:
                best = Match(text, end, length)
        return best

    def _last(self) -> Sequence[int]:
        """Return the last ids of prompt and answer, at most `LONGEST`."""
        last = self._answer.ids[-LONGEST:]
        return last if len(last) == LONGEST else self._prompt.ids[len(last) - LONGEST :] + last


class Lookups:
    """Makes the drafters of a scheduler's sequences. Answers of one request share the index of their prompt.

    Args:
        keeps_others: also search sequences that have ended. Then a client can find out from the latency of an answer
            whether other requests had the same text. So this is only for schedulers whose prefix cache reveals as much.
    """

    def __init__(self, *, keeps_others: bool = False) -> None:
        self._others = Text() if keeps_others else None
        self._texts: weakref.WeakKeyDictionary[loop_request.Request, list[Text]] = weakref.WeakKeyDictionary()

    def __call__(self, sequence: loop_request.Sequence) -> Lookup:
        """Return the drafter of a sequence."""
        request = sequence.request
        texts = self._texts.get(request)
        if texts is None:
            texts = self._texts[request] = [Text(request.prompt_ids)]
            texts += [Text(request.predicted_ids)] if request.predicted_ids else []
        return Lookup(texts[0], [*texts[1:], *([] if self._others is None else [self._others])])

    def end(self, sequence: loop_request.Sequence) -> None:
        """Keep the ids of a sequence that has ended, without those that others had before."""
        others = self._others
        if others is None:
            return
        for token in (*sequence.ids[sequence.request.n_cached :], END):
            others.append(token)
        if len(others.ids) > MOST_OTHERS:  # a new text: drafters have places in the old one
            self._others = Text(others.ids[-(MOST_OTHERS // 2) :])
