"""How an axis of a matrix is dealt to ranks: by heads, by blocks of the stored type, or by rows of the vocabulary.

A deal gives each rank its ranges of the axis; all matrices of a layer that must agree share one deal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

# The largest share of a rank over an even share. Within it 35 blocks go to two ranks as 17 and 18; 3 blocks do not.
MOST_UNEVEN = 1.2


class Deal(ABC):
    """How an axis is dealt. `str` gives the sizes, for messages."""

    @abstractmethod
    def fits(self, size: int) -> bool:
        """Return whether the axis can be dealt to `size` ranks."""

    @abstractmethod
    def ranges(self, rank: int, size: int) -> Ranges:
        """Return the ranges [first, last) of a rank, ascending."""


def is_even(n: int, size: int) -> bool:
    """Return whether n pieces can be dealt to `size` ranks so that no rank has far more than the others."""
    return n >= size and -(-n // size) * size <= MOST_UNEVEN * n


@dataclass(frozen=True)
class Pieces(Deal):
    """Sections end to end, each of n pieces; a rank gets the same run of pieces of every section.

    Attributes:
        n: pieces of each section.
        widths: the width of a piece, by section.
        what: the sizes, for messages.
    """

    n: int
    widths: tuple[int, ...]
    what: str

    def fits(self, size: int) -> bool:
        return is_even(self.n, size)

    def ranges(self, rank: int, size: int) -> Ranges:
        first, last, at, found = self.n * rank // size, self.n * (rank + 1) // size, 0, []
        for width in self.widths:
            found.append((at + first * width, at + last * width))
            at += self.n * width
        return tuple(found)

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Heads:
    """The heads of attention. A rank has whole KV heads and all queries that read them.

    If there are more ranks than KV heads, several ranks have a copy of one KV head, and share out its query heads.

    Attributes:
        n_heads: H.
        n_kv_heads: G, a divisor of H.
        head_dim: E.
        block: weights of a block of the output projection's type, whose columns are cut between blocks.
        equal: whether all ranks must have as many heads, because a norm reads the heads of all.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    block: int
    equal: bool = False

    @property
    def ratio(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    def _pieces(self, size: int) -> tuple[int, int]:
        """Return how many pieces are dealt, and the query heads of a piece; no pieces if they are not whole."""
        heads = self.ratio if size <= self.n_kv_heads else 1
        heads *= self.block // math.gcd(self.block, heads * self.head_dim)
        return (0, heads) if self.n_heads % heads else (self.n_heads // heads, heads)

    def fits(self, size: int) -> bool:
        """Return whether the heads can be dealt to `size` ranks."""
        n, _ = self._pieces(size)
        if size <= self.n_kv_heads:
            return is_even(n, size) and not (self.equal and n % size)
        return n > 0 and n % size == 0 and size % self.n_kv_heads == 0

    def queries(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first query head of a rank, and the one after its last."""
        n, heads = self._pieces(size)
        return n * rank // size * heads, n * (rank + 1) // size * heads

    def keys(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first KV head of a rank, and the one after its last."""
        first, last = self.queries(rank, size)
        return first // self.ratio, -(-last // self.ratio)

    def __str__(self) -> str:
        text = f"{self.n_heads} query heads and {self.n_kv_heads} KV heads of {self.head_dim}"
        return text if self.block == 1 else f"{text}, and columns in blocks of {self.block}"


@dataclass(frozen=True)
class OfHeads(Deal):
    """An axis of query heads, or of KV heads if `are_keys`; a head is `width` wide.

    If `are_normed`, keys are not cut where ranks have copies of a KV head: a norm reads every head once.
    """

    heads: Heads
    width: int
    are_keys: bool = False
    are_normed: bool = False

    def fits(self, size: int) -> bool:
        return self.heads.fits(size)

    def ranges(self, rank: int, size: int) -> Ranges:
        first, last = (self.heads.keys if self.are_keys else self.heads.queries)(rank, size)
        if self.are_normed and size > self.heads.n_kv_heads:
            first, last = 0, self.heads.n_kv_heads
        return ((first * self.width, last * self.width),)

    def __str__(self) -> str:
        return str(self.heads)


@dataclass(frozen=True)
class Vocabulary(Deal):
    """The rows of the head: equal runs, of which the last may be shorter, so that logits are gathered in one piece."""

    n: int

    def share(self, size: int) -> int:
        """Return the rows of every rank but the last."""
        return -(-self.n // size)

    def fits(self, size: int) -> bool:
        return (size - 1) * self.share(size) < self.n

    def ranges(self, rank: int, size: int) -> Ranges:
        share = self.share(size)
        return ((rank * share, min((rank + 1) * share, self.n)),)

    def __str__(self) -> str:
        return f"{self.n} tokens"


def by_blocks(width: int, block: int) -> Pieces:
    """Return the deal of an axis of this width by blocks of the type, which fill it."""
    return Pieces(width // block, (block,), f"{width:,} columns in blocks of {block}")
