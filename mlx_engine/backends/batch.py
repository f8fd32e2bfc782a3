"""What a forward pass reads: the new tokens of one or more sequences, laid end to end, and their keys and values.

Keys and values lie in pages of a fixed number of tokens. The stores of all layers have the same number of slots for a
page; a sequence has a page table, which says with which slot each of its pages begins. `mlx_engine/cache` decides which
page is whose.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mlx_engine.backends.parameters import Array, Token

# Whose logits a pass is run for: every token's, some tokens', or nobody's, as for a part of a long prompt.
Wanted = Literal["every", "some", "none"]


class KV(Protocol):
    """The keys and values of a sequence. Tokens that a pass has begun count when they are committed."""

    def commit(self, n: int) -> None:
        """Count the first n of the tokens that were begun."""

    def roll_back(self, n: int) -> None:
        """Forget the last n of the tokens that were begun."""


class KVSpan(NamedTuple):
    """Keys and values of one sequence in one pass.

    Attributes:
        pages: (P,) int64, the slot with which each page begins; page i has the positions from i * page tokens on. Of
            pages that have left the layers' window, and of those behind the last token, the entry is undefined.
        length: tokens of the sequence, those of this pass included.
        n_new: how many of the last ones are of this pass.
    """

    pages: np.ndarray
    length: int
    n_new: int

    def slots(self, first: int, last: int, page: int) -> slice | np.ndarray:
        """Return the slots of positions [first, last), in a slice where they follow each other."""
        positions = np.arange(first, last)
        return in_order(self.pages[positions // page] + positions % page)


class KVView(NamedTuple):
    """What the queries of a pass attend to in one layer. Of each sequence they are the last tokens.

    Attributes:
        store: keys and values of all sequences, as the backend keeps them.
        page: tokens of a page.
        spans: (B,), one for each sequence.
        window: how many of the latest tokens a token sees, itself included; None is all.
    """

    store: Array
    page: int
    spans: Sequence[KVSpan]
    window: int | None = None

    def first_visible(self, span: KVSpan, n_queries: int) -> int:
        """Return the first position that any of a sequence's last `n_queries` tokens sees."""
        return 0 if self.window is None else max(0, span.length - n_queries + 1 - self.window)


class KVGroup(NamedTuple):
    """What layers with one window have in common in a pass.

    Attributes:
        window: how many of the latest tokens a token sees; None is all.
        spans: (B,), one for each sequence.
        slots: (T,) int64, where keys and values of the new tokens are written.
    """

    window: int | None
    spans: tuple[KVSpan, ...]
    slots: np.ndarray


@dataclass(eq=False)
class Stores:
    """The memory of all keys and values.

    Attributes:
        layers: one array for each layer.
        group_of: the number of each layer's group.
        page: tokens of a page.
        are_kept: whether a later pass reads what this one writes. Else layers may share memory.
    """

    layers: list[Array]
    group_of: Sequence[int]
    page: int
    are_kept: bool


@dataclass(eq=False)
class Batch:
    """The new tokens of one or more sequences, and where their keys and values lie.

    Attributes:
        ids: (T,) new tokens of all sequences, end to end.
        lengths: (B,) how many are of each sequence.
        positions: (T,) absolute positions.
        wanted: (B,) of how many of each sequence's last tokens logits are wanted.
        kv: (B,) the sequences.
        stores: keys and values of all layers.
        groups: of layers.
    """

    ids: Sequence[Token]
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    wanted: tuple[int, ...]
    kv: tuple[KV, ...]
    stores: Stores
    groups: tuple[KVGroup, ...]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """(R,) the numbers of the tokens whose logits are wanted, ascending."""
        if self.wanted == self.lengths:
            return tuple(range(len(self.positions)))
        ends = itertools.accumulate(self.lengths)
        return tuple(t for end, n in zip(ends, self.wanted, strict=True) for t in range(end - n, end))

    @property
    def want(self) -> Wanted:
        """Whose logits are wanted."""
        return "every" if self.wanted == self.lengths else "some" if any(self.wanted) else "none"

    def group(self, layer: int) -> KVGroup:
        """Return a layer's group."""
        return self.groups[self.stores.group_of[layer]]

    def commit(self) -> None:
        """Count the new tokens of every sequence: the pass is complete, or on a lazy backend begun for good."""
        for kv, n in zip(self.kv, self.lengths, strict=True):
            kv.commit(n)

    def roll_back(self) -> None:
        """Forget the new tokens of every sequence, as if the pass had never begun."""
        for kv, n in zip(self.kv, self.lengths, strict=True):
            kv.roll_back(n)


def in_order(slots: np.ndarray) -> slice | np.ndarray:
    """Return the slots as a slice if each follows the one before, and as they are if not."""
    n = len(slots)
    if n and slots[-1] - slots[0] == n - 1 and (n < 3 or bool((slots[1:] - slots[:-1] == 1).all())):
        return slice(int(slots[0]), int(slots[0]) + n)
    return slots
