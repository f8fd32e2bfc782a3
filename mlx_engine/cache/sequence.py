"""The KV cache of a sequence (page tables, length, pending tokens), and the batch of a pass over several sequences.

Before a forward pass of n tokens, `begin(n)` allocates pages, and the n tokens are then pending. After the pass,
`commit(n)` makes them part of the sequence. `roll_back(n)` discards them if the pass has failed, or if the sequence
continues with other tokens. Several passes may begin before the first is committed, because a lazy backend submits a
pass before the token of the previous pass has reached the host.

A page may have several holders: sequences and a prefix cache. `lend` returns pages for another holder, and `adopt`
begins a sequence with pages of another holder. Before a token in a shared page is overwritten, the page is copied.
After `lend`, the sequence can still write new tokens into its partly filled last page without a copy: no other holder
reads the slots after the tokens that were lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlx_engine.backends.batch import NO_RUNS, Batch, KVGroup, KVSpan, first_visible
from mlx_engine.backends.parameters import Token
from mlx_engine.cache.states import SequenceState, Snapshot
from mlx_engine.errors import CacheFullError

if TYPE_CHECKING:
    from mlx_engine.cache.pool import KVPool


class KVSequence:
    """The KV cache of one sequence. Made by `KVPool.sequence`.

    Attributes:
        length: number of committed tokens, which is the position of the next token.
        pending: number of tokens that were begun, and neither committed nor rolled back.
        capacity: the largest number of tokens.
        tables: a page table for each group of layers with the same window. A slot is the place of a token in the KV
            stores (`pool.py`). An entry of a table is the first slot of the page, or -1 if the page is not allocated.
        adapter: the number of the LoRA adapter with which the tokens are computed, which is its row in
            `Adapters.masks`; 0 for the model without an adapter.
    """

    def __init__(self, pool: KVPool, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 token, found {capacity}")
        self.pool, self.capacity = pool, capacity
        self.length = self.pending = 0
        self.adapter = pool.adapter
        self.state, self._has_state = SequenceState(pool.states), pool.states.n_slots > 0
        n_pages = -(-capacity // pool.page)
        self.tables = [np.full(n_pages, -1, dtype=np.int64) for _ in pool.windows]
        # Entries [first, end) of a table are allocated pages; `end` is the same for all tables.
        self._firsts, self._end = [0] * len(pool.windows), 0
        # Other holders of the pages may read the tokens before this position. Before such a token is overwritten,
        # `_allocate` copies its page if the page still has another holder.
        self._lent = 0

    @property
    def n_pages(self) -> int:
        """Number of allocated pages, of all groups together."""
        return sum(self._end - first for first in self._firsts)

    def begin(self, n: int, *, each: bool = False) -> int:
        """Allocate pages for n more tokens, which are then pending, and return the position of the first of them.

        With `each`, the recurrent state after every token is kept, so that any number of the tokens can be committed.
        If the first of the n tokens overwrites a token that another holder of the page reads, the page is copied first.

        Raises:
            CacheFullError: the capacity is exceeded, or the pool has too few free pages, or too few free slots for
                recurrent states. Then the sequence has not changed.
        """
        if n < 1:
            raise ValueError(f"begin: expected at least one token, found {n}")
        first = self.length + self.pending
        if first and not self.pool.stores.are_kept:
            raise ValueError("begin: found a second pass over a pool whose stores are not kept (kept=False)")
        if first + n > self.capacity:
            raise CacheFullError(length=first, wanted=n, capacity=self.capacity)
        if self._has_state and not self.pool.states.make_room(n if each else 1):
            raise CacheFullError(length=first, wanted=n, capacity=first, pool_is_full=True)
        end = max(self._end, -(-(first + n) // self.pool.page))
        if end > self._end or first < self._lent:
            self._allocate(first, n, end)
        if self._has_state:
            # Keep the state at the last page boundary, too, for the prefix cache. The next prompt of a client often
            # differs only near the end, and can then begin with this state.
            inside = (first + n - 1) // self.pool.page * self.pool.page if self.pool.reclaim is not None else None
            self.state.begin(first, n, inside, each=each)
        self.pending += n
        return first

    def commit(self, n: int) -> None:
        """Commit the first n pending tokens, and free the pages that have left the window of their layers."""
        if not 0 <= n <= self.pending:
            raise ValueError(f"commit: expected at most the {self.pending} tokens that were begun, found {n}")
        self.pending -= n
        self.length += n
        if self._has_state:
            self.state.commit(self.length)
        for group, window in enumerate(self.pool.windows):
            if window is not None:
                self._give_back(group, first_visible(window, self.length) // self.pool.page)

    def roll_back(self, n: int) -> None:
        """Discard the last n pending tokens, and free their pages."""
        if not 0 <= n <= self.pending:
            raise ValueError(f"roll_back: expected at most the {self.pending} tokens that were begun, found {n}")
        self.pending -= n
        self.state.roll_back(self.length + self.pending)
        self._free_end()

    def truncate(self, length: int) -> None:
        """Discard the tokens from position `length` on, and free their pages.

        Raises:
            ValueError: the sequence is shorter or has pending tokens; or it has a recurrent state, which cannot be
                rewound; or it has freed pages that would be inside a layer's window again.
        """
        if not 0 <= length <= self.length or self.pending:
            raise ValueError(
                f"truncate: expected a length of at most {self.length} and no pending tokens, "
                f"found {length} and {self.pending}"
            )
        for group, window in enumerate(self.pool.windows):
            if window is not None and self._firsts[group] * self.pool.page > first_visible(window, length):
                needed = f"a layer with a window of {abs(window)} needs earlier tokens whose pages are already freed"
                raise ValueError(f"cannot truncate to {length} tokens: {needed}")
        if length < self.length and self._has_state:
            raise ValueError(f"cannot truncate to {length} tokens: the state after them is no longer kept")
        self.length = length
        self._free_end()

    def close(self) -> None:
        """Give back all pages and discard all tokens. The sequence is then empty, and can be used again.

        Raises:
            ValueError: tokens are pending, so that a pass could still write to the pages.
        """
        if self.pending:
            raise ValueError(f"close: expected no pending tokens, found {self.pending}; commit or roll back their pass")
        for group in range(len(self.tables)):
            self._give_back(group, self._end)
        self.state.close()
        self._firsts, self._end = [0] * len(self.tables), 0
        self.length = self._lent = 0

    def fork(self) -> KVSequence:
        """Return a new sequence that begins with all committed tokens of this one, see `adopt`.

        Raises:
            CacheFullError: the pool has no free page for the copy of a partly filled last page. Then nothing has
                changed.
        """
        fork = self.pool.sequence(self.capacity)
        fork.adapter = self.adapter
        fork.adopt(self.lend(self.length), self.length, self.state.committed)
        return fork

    def lend(self, length: int) -> list[np.ndarray]:
        """Return the pages of the first `length` committed tokens. The new holder must add references to the pages.

        The result has, for each group of layers, an array (P,) with the first slot of each of P pages; -1 stands for a
        page that has left the window.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"lend: expected at most the {self.length} committed tokens, found {length}")
        self._lent = max(self._lent, length)
        return [table[: -(-length // self.pool.page)].copy() for table in self.tables]

    def adopt(self, pages: Sequence[np.ndarray], length: int, state: Snapshot | None = None) -> None:
        """Begin with the first `length` tokens of another holder; share whole pages, copy a partly filled last page.

        Args:
            pages: the pages of these tokens, as `lend` returns them. A page that no later token reads may be -1.
            length: the number of tokens.
            state: the recurrent state after these tokens, for models that have one.

        Raises:
            CacheFullError: the capacity is exceeded, or the pool has no free page for the copy of a partly filled last
                page. Then nothing has changed.
        """
        if self.length or self.pending or not self.pool.stores.are_kept:
            raise ValueError("adopt: expected an empty sequence in a pool whose stores are kept")
        if length > self.capacity:
            raise CacheFullError(length=0, wanted=length, capacity=self.capacity)
        if length and self._has_state and (state is None or state.length != length):
            raise ValueError(f"adopt: expected the state after {length} tokens, found {state}")
        firsts = [first_visible(window, length) // self.pool.page for window in self.pool.windows]
        needed = [of_group[first:] for of_group, first in zip(pages, firsts, strict=True)]
        held = [of_group[of_group >= 0] for of_group in needed]
        for group, of_group in enumerate(held):
            # Add the references before `make_room`, which could otherwise reclaim these pages.
            self.pool.retain(group, of_group)
        if state is not None:
            self.state.adopt(state)
        if length % self.pool.page and not self.pool.make_room([1] * len(firsts)):
            for group, of_group in enumerate(held):
                self.pool.give_back(group, of_group)
            self.state.close()
            raise CacheFullError(length=0, wanted=length, capacity=length - length % self.pool.page, pool_is_full=True)
        self._end, self.length = -(-length // self.pool.page), length
        self._lent = length - length % self.pool.page
        for group, (table, first) in enumerate(zip(self.tables, firsts, strict=True)):
            table[first : self._end] = needed[group]
            self._firsts[group] = first
            if length % self.pool.page:
                self._replace_last(group)

    def pages(self, group: int) -> np.ndarray:
        """Return the first slot of each allocated page of a group of layers, as an array (n,)."""
        table = self.tables[group][self._firsts[group] : self._end]
        return table[table >= 0]

    def slots(self, group: int, first: int, n: int) -> np.ndarray:
        """Return the slots (n,) int64 of positions [first, first + n) in a group of layers."""
        table, page = self.tables[group], self.pool.page
        if n == 1:
            return table[first // page : first // page + 1] + first % page
        positions = np.arange(first, first + n)
        return table[positions // page] + positions % page

    def _allocate(self, first: int, n: int, end: int) -> None:
        """Allocate the pages before page number `end`, for n tokens from position `first` on.

        In groups in which another holder reads the page of position `first`, copy this page.
        """
        more, groups = end - self._end, range(len(self.tables))
        copied = [first < self._lent and self._is_shared(group, first) for group in groups]
        if not self.pool.make_room([more + copy for copy in copied]):
            spare = min(self.pool.free_pages(group) - copied[group] for group in groups)
            capacity = first if spare < 0 else (self._end + spare) * self.pool.page
            raise CacheFullError(length=first, wanted=n, capacity=capacity, pool_is_full=True)
        for group, table in enumerate(self.tables):
            if copied[group]:
                self._replace_last(group)
            if more:
                table[self._end : end] = self.pool.take(group, more)
        self._end, self._lent = end, min(self._lent, first)

    def _is_shared(self, group: int, position: int) -> bool:
        """Return whether the page of a position is allocated, and has another holder."""
        page = self.tables[group][position // self.pool.page :][:1]
        return position // self.pool.page < self._end and bool(self.pool.references(group, page) > 1)

    def _replace_last(self, group: int) -> None:
        """Copy the last, partly filled page of a group to a free page, and give back the old page."""
        table, last, n = self.tables[group], self._end - 1, (self.length + self.pending) % self.pool.page
        source, target = table[last : last + 1].copy(), self.pool.take(group, 1)
        if source[0] >= 0:  # -1 if no later token reads the page: with a window of 1, or at a chunk's end in Llama 4
            self.pool.copy(group, int(source[0]), int(target[0]), n)
            self.pool.give_back(group, source)
        table[last] = target[0]

    def _give_back(self, group: int, end: int) -> None:
        """Give back a group's allocated pages before page number `end`."""
        first = self._firsts[group]
        if end > first:
            self.pool.give_back(group, self.tables[group][first:end].copy())
            self.tables[group][first:end] = -1
            self._firsts[group] = end

    def _free_end(self) -> None:
        """Free the pages after the last token."""
        end = -(-(self.length + self.pending) // self.pool.page)
        if end < self._end:
            for group, table in enumerate(self.tables):
                self.pool.give_back(group, table[end : self._end].copy())
                table[end : self._end] = -1
            self._end = end


class SequenceInput(NamedTuple):
    """The new tokens of one sequence in a pass.

    Attributes:
        ids: (n,) the tokens, at least one.
        kv: the KV cache of the sequence.
        wanted: logits are computed for this number of tokens at the end of `ids`; None for all tokens.
        each: as in `KVSequence.begin`.
    """

    ids: Sequence[Token]
    kv: KVSequence
    wanted: int | None = 1
    each: bool = False


def begin(parts: Sequence[SequenceInput]) -> Batch:
    """Allocate pages for new tokens, and return the tokens as one batch. The caller commits or rolls back the tokens.

    Raises:
        CacheFullError: there are too few free pages, or too few free slots for recurrent states, or the tokens exceed
            the capacity of a sequence. Then no sequence has changed.
    """
    if not parts:
        raise ValueError("expected new tokens of at least one sequence, found none")
    sequences, lengths = [part.kv for part in parts], tuple(len(part.ids) for part in parts)
    wanted = tuple(n if part.wanted is None else part.wanted for part, n in zip(parts, lengths, strict=True))
    if not all(lengths):
        raise ValueError(f"expected at least one new token of each sequence, found {lengths}")
    if any(kv.pool is not sequences[0].pool for kv in sequences):
        raise ValueError("expected sequences of one pool, found several pools")
    if len(set(sequences)) != len(parts):
        raise ValueError(f"expected {len(parts)} different sequences, found one of them twice")
    if any(not 0 <= want <= n for want, n in zip(wanted, lengths, strict=True)):
        raise ValueError(f"expected at most {lengths} wanted logits, found {wanted}")
    firsts: list[int] = []
    try:
        for part, n in zip(parts, lengths, strict=True):
            firsts.append(part.kv.begin(n, each=part.each))
        return _batch(parts, lengths, wanted, firsts)
    except BaseException:
        for part, n in list(zip(parts, lengths, strict=True))[: len(firsts)]:
            part.kv.roll_back(n)
        raise


def _batch(
    parts: Sequence[SequenceInput], lengths: tuple[int, ...], wanted: tuple[int, ...], firsts: Sequence[int]
) -> Batch:
    pool, sequences = parts[0].kv.pool, tuple(part.kv for part in parts)
    places = tuple(zip(sequences, firsts, lengths, strict=True))
    groups = tuple(
        KVGroup(
            window,
            tuple([KVSpan(kv.tables[group], first + n, n) for kv, first, n in places]),
            np.concatenate([kv.slots(group, first, n) for kv, first, n in places]),
        )
        for group, window in enumerate(pool.windows)
    )
    return Batch(
        ids=[i for part in parts for i in part.ids],
        lengths=lengths,
        positions=tuple(p for first, n in zip(firsts, lengths, strict=True) for p in range(first, first + n)),
        wanted=wanted,
        kv=sequences,
        stores=pool.stores,
        groups=groups,
        runs=_runs(parts, lengths) if pool.states.n_slots else NO_RUNS,
        adapters=tuple([kv.adapter for kv in sequences]),
    )


def _runs(parts: Sequence[SequenceInput], lengths: Sequence[int]) -> np.ndarray:
    """Return the runs (n, 4) int64 of a pass: first row, number of rows, source slot, target slot.

    In a run, the tokens of consecutive rows advance the recurrent state of one sequence (`StateView` in
    `backends/batch.py`).
    """
    runs, row = [], 0
    for part, n in zip(parts, lengths, strict=True):
        at = row
        for n_rows, source, target in part.kv.state.runs:
            runs.append((at, n_rows, source, target))
            at += n_rows
        row += n
    return np.array(runs, dtype=np.int64).reshape(-1, 4)
