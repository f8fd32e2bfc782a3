"""The input of a forward pass: the new tokens of one or more sequences, laid end to end, and their KV cache.

A KV store is the memory for the keys and values of one layer. It is divided into slots, one for each token. A page is a
fixed number of consecutive slots. A page table lists the first slot of each page of a sequence. `mlx_engine/cache`
assigns pages to sequences, and backends read the classes in this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mlx_engine.backends.parameters import Array, Native, Token
from mlx_engine.kernels.cached import cached_property

# Whether a pass returns the logits of every new token, of some or of none. "none" is usual for all chunks of a long
# prompt except the last one.
Wanted = Literal["every", "some", "none"]


class KV(Protocol):
    """The KV cache of a sequence. The new tokens of a pass are pending until they are committed."""

    def commit(self, n: int) -> None:
        """Commit the first n pending tokens."""

    def roll_back(self, n: int) -> None:
        """Discard the last n pending tokens."""


class KVSpan(NamedTuple):
    """The page table of one sequence in one pass.

    Attributes:
        pages: (P,) int64, the first slot of each of P pages; page i holds positions from i * (tokens per page) on.
            An entry is undefined if its page has left the attention window, or begins after the last token.
        length: number of tokens in the sequence, including the new tokens of this pass.
        n_new: number of new tokens in this pass; they are the sequence's last tokens.
    """

    pages: np.ndarray
    length: int
    n_new: int

    def slots(self, first: int, last: int, page: int) -> slice | np.ndarray:
        """Return the slots of positions [first, last), as a slice if they are consecutive. A page has `page` tokens."""
        pages = self.pages[first // page : max(first // page + 1, -(-last // page))]
        start = first % page
        if bool((pages[1:] - pages[:-1] == page).all()):
            return slice(int(pages[0]) + start, int(pages[0]) + start + last - first)
        slots = (pages[:, None] + np.arange(page)).reshape(-1)
        return slots[start : start + last - first]


def first_visible(window: int | None, position: int) -> int:
    """Return the first position that the token at `position` attends to.

    With a positive window W, a token attends to the last W tokens, including itself. A negative window -C, for the
    chunked attention of Llama 4, divides the sequence into chunks of C tokens, and a token attends only to its own
    chunk. With None, a token attends to all earlier tokens and itself.
    """
    if window is None:
        return 0
    return max(0, position + 1 - window) if window > 0 else position - position % -window


class KVView(NamedTuple):
    """The keys and values of one layer that the queries of a pass attend to.

    Attributes:
        store: the layer's KV store, with the keys and values of all sequences.
        page: tokens per page.
        spans: (B,) the page table of each sequence.
        window: the attention window, see the function `first_visible`.
    """

    store: Native
    page: int
    spans: Sequence[KVSpan]
    window: int | None = None

    def first_visible(self, span: KVSpan, n_queries: int) -> int:
        """Return the first position that any of the last `n_queries` tokens of a sequence attends to."""
        return first_visible(self.window, span.length - n_queries)


class StateView(NamedTuple):
    """One array of a layer's state (such as that of the convolution), for the operation that reads and writes it.

    Attributes:
        store: this array of all sequences' states, indexed by slot. The operation writes to the store in place.
        runs: (n, 4) int64, n runs of consecutive rows (tokens) of the pass: first row, number of rows, source slot and
            target slot. A run reads the state before its first row from the source slot, and writes the state after its
            last row to the target slot, which is a different slot. If a sequence has several runs, each later run reads
            the state that the previous run has written.
    """

    store: Native
    runs: np.ndarray


class KVGroup(NamedTuple):
    """The page tables and slots that all layers with the same attention window share.

    Attributes:
        window: the attention window, see the function `first_visible`.
        spans: (B,) the page table of each sequence.
        slots: (T,) int64, the slots for keys and values of the new tokens.
    """

    window: int | None
    spans: tuple[KVSpan, ...]
    slots: np.ndarray


@dataclass(eq=False)
class Stores:
    """The KV stores and states of all layers.

    Attributes:
        layers: one KV store per layer; None for a layer without keys and values.
        group_of: for each layer, the index of its `KVGroup` in `Batch.groups`; -1 if the layer has no keys and values.
        page: tokens per page.
        are_kept: whether later passes read the keys and values that this pass writes. If not, layers may share memory.
        states: for each layer, the stores of its state's arrays, or () if it has no state. Empty if no layer has one.
    """

    layers: list[Any]
    group_of: Sequence[int]
    page: int
    are_kept: bool
    states: Sequence[tuple[Array, ...]] = ()

    @property
    def arrays(self) -> list[Array]:
        """The KV stores and states of all layers. To wait until a pass has written them, call `Backend.wait`."""
        return [*(store for store in self.layers if store is not None), *(s for of in self.states for s in of)]


# `Batch.runs` of a model without states.
NO_RUNS = np.empty((0, 4), dtype=np.int64)


@dataclass(eq=False)
class Batch:
    """The new tokens of one or more sequences, and the slots of their keys and values.

    Attributes:
        ids: (T,) new tokens of all sequences, end to end.
        lengths: (B,) number of new tokens of each sequence.
        positions: (T,) absolute positions.
        wanted: (B,) number of each sequence's last tokens whose logits are wanted.
        kv: (B,) the KV cache of each sequence.
        stores: the KV stores and states of all layers.
        groups: one `KVGroup` per attention window.
        runs: (n, 4) int64, see `StateView`. Empty if no layer has a state.
        best: the number k if the samplers need only the k largest logits of each wanted row; None if they need all.
            Ranks (processes that share the model) send each other only the needed logits; see `Backend.all_best` and
            `distributed/pipeline.py`.
        keeps_hidden: whether the pass sets `hidden`.
        hidden: the hidden states (T, D) of all tokens after the last norm, if `keeps_hidden`; None before the pass.
        adapters: (B,) for each sequence, the row of its LoRA adapter in `Adapters.masks`; 0 if it has no adapter.
    """

    ids: Sequence[Token]
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    wanted: tuple[int, ...]
    kv: tuple[KV, ...]
    stores: Stores
    groups: tuple[KVGroup, ...]
    runs: np.ndarray = field(default_factory=lambda: NO_RUNS)
    best: int | None = None
    keeps_hidden: bool = False
    hidden: Array | None = None
    adapters: tuple[int, ...] = ()

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The indices (R,) of the tokens whose logits are wanted, ascending."""
        if self.wanted == self.lengths:
            return tuple(range(len(self.positions)))
        ends = itertools.accumulate(self.lengths)
        return tuple(t for end, n in zip(ends, self.wanted, strict=True) for t in range(end - n, end))

    @property
    def want(self) -> Wanted:
        """Whether the logits of every token, of some or of none are wanted."""
        return "every" if self.wanted == self.lengths else "some" if any(self.wanted) else "none"

    def group(self, layer: int) -> KVGroup:
        """Return the group of a layer."""
        return self.groups[self.stores.group_of[layer]]

    def state(self, layer: int, part: int) -> StateView:
        """Return the view of array `part` of a layer's state; `part` is an index into `Stores.states[layer]`."""
        return StateView(self.stores.states[layer][part], self.runs)

    def commit(self) -> None:
        """Commit the new tokens of every sequence. The pass must have run or, on a lazy backend, been submitted."""
        for kv, n in zip(self.kv, self.lengths, strict=True):
            kv.commit(n)

    def roll_back(self) -> None:
        """Discard the new tokens of every sequence, as if the pass had not run."""
        for kv, n in zip(self.kv, self.lengths, strict=True):
            kv.roll_back(n)


def in_order(slots: np.ndarray) -> slice | np.ndarray:
    """Return the slots as a slice if they are consecutive; if not, return them unchanged."""
    n = len(slots)
    if n and slots[-1] - slots[0] == n - 1 and (n < 3 or bool((slots[1:] - slots[:-1] == 1).all())):
        return slice(int(slots[0]), int(slots[0]) + n)
    return slots
