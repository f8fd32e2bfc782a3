"""N-gram lookup for speculative decoding: find a sequence's last tokens in earlier text, and propose the next tokens.

A `Text` is a list of token ids with an index, as in LZ77 with hash chains: each pair of neighbouring ids belongs to a
hash bucket, and each bucket has a chain of the places of its pairs. A search compares the last ids of a sequence with
at most `CANDIDATES` places, over at most `LONGEST` ids each, so its time is bounded for every text. The match is the
place with the longest run of equal ids. While the sequence continues in the same way as the text after the match, the
match grows, and no search is needed. A text takes 12 to 16 bytes per token.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from mlx_engine.loop import request as loop_request

# A search compares at most CANDIDATES places in each text, and at most LONGEST ids at each place.
CANDIDATES, LONGEST = 8, 32
# The number of ids in a key of the index. A single id would predict the next id badly.
KEY = 2
# The smallest number of hash buckets of a text. The number of buckets is a power of two, and at least that of the ids.
FEWEST = 64
_MULTIPLIER = 0x9E3779B1
# MOST_OTHERS is the largest number of ids of ended sequences that are kept. END follows the ids of each of these
# sequences.
MOST_OTHERS, END = 1 << 18, -1


class Match(NamedTuple):
    """An earlier occurrence of the last `length` ids of a sequence: `text.ids[end - length : end]`."""

    text: Text
    end: int
    length: int


class Text:
    """A list of token ids, to which ids can be appended, with an index of the places of each pair of ids."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("i", ids)
        self._index()

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and of the index."""
        return sum(of.itemsize * len(of) for of in (self.ids, self._before, self._newest))

    def append(self, token: int) -> None:
        """Append an id, on average in constant time. If the index is full, make a new one of twice the size."""
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

    def longest(self, tail: Sequence[int]) -> tuple[int, int]:
        """Find the longest match of the last ids of `tail` in this text; return `end` and `length` of the `Match`.

        A match counts only if an id follows it in the text, because this id is proposed. Of several matches with the
        same length, return the most recent one. Only the `CANDIDATES` most recent places in the hash bucket of the last
        two ids of `tail` are compared; return (0, 0) if none of these places is a match. `tail` has at least two ids.
        """
        ids, n = self.ids, len(self.ids)
        a, b = tail[-2], tail[-1]
        end, found, length = self._newest[(a * _MULTIPLIER ^ b) * _MULTIPLIER >> 7 & self._mask], 0, 0
        for _ in range(CANDIDATES):
            if end < KEY:
                break
            if end < n:
                agreeing = _agreeing(ids, end, tail)
                if agreeing > length:
                    found, length = end, agreeing
            end = self._before[end - 1]
        return (found, length) if length >= KEY else (0, 0)

    def _index(self) -> None:
        """Make the index of all ids.

        The end of a pair is the index of the id after it. `_newest[bucket]` is the end of the last pair in a bucket.
        For a pair that ends at `end`, `_before[end - 1]` is the end of the previous pair in the same bucket. -1 stands
        for no pair.
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


def _agreeing(ids: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """Return how many ids before `end` agree with the last ids of `tail`, at most `LONGEST`."""
    n, most = 0, min(end, len(tail), LONGEST)
    while n < most and ids[end - 1 - n] == tail[-1 - n]:
        n += 1
    return n


class Lookup:
    """A `Drafter` that proposes tokens for one sequence, from the text of this sequence and from other texts.

    Only this drafter reads the `Text` of the answer. The prompt's `Text` and those of other sequences are shared with
    other drafters.
    """

    def __init__(self, prompt: Text, others: Sequence[Text] = ()) -> None:
        self._answer, self._prompt = Text(), prompt
        # If several texts have a longest match of the same length, the first text in this list is used.
        self._texts = [self._answer, prompt, *others]
        self._match = Match(self._answer, 0, 0)

    def extend(self, ids: Sequence[int]) -> None:
        """Append new ids of the answer, on average in constant time for each id."""
        for token in ids:
            text, end, length = self._match
            goes_on = bool(length) and end < len(text.ids) and text.ids[end] == token
            self._answer.append(token)
            self._match = Match(text, end + 1, length + 1) if goes_on else self._longest()

    def propose(self, most: int) -> tuple[Sequence[int], int]:
        """Return at most `most` ids that may follow, and the length of the match, limited to `LONGEST`."""
        text, end, length = self._match
        if not length:
            return (), 0
        found = text.ids[end : end + most].tolist()
        # If the match is in the answer, and fewer than `most` ids follow it, assume that the answer repeats these ids.
        if text is self._answer:
            period = len(found)
            found += [found[i % period] for i in range(period, most)]
        return found, min(length, LONGEST)

    def _longest(self) -> Match:
        """Return the longest match of the last ids in all texts."""
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
        keeps_others: whether to search ended sequences, too. The latency of an answer then reveals to a client whether
            other requests had the same text. So use this only if the scheduler's prefix cache reveals the same.
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
        """Keep the ids of an ended sequence for later searches, if `keeps_others` was set.

        The ids that came from the prefix cache are left out, because an earlier sequence had the same ids.
        """
        others = self._others
        if others is None:
            return
        for token in (*sequence.ids[sequence.request.n_cached :], END):
            others.append(token)
        if len(others.ids) > MOST_OTHERS:  # keep the last half, in a new text: drafters refer to places in the old one
            self._others = Text(others.ids[-(MOST_OTHERS // 2) :])
