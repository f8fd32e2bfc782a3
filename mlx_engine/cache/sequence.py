"""The KV cache of one sequence: its page tables, its length and its pending tokens.

A forward pass of n tokens calls `begin(n)`, which allocates pages; the n tokens are then pending. `commit(n)` adds them
to the sequence; `roll_back(n)` discards them, if the pass failed or other tokens follow. Several passes may be begun
before the first is committed: a lazy backend submits a pass before the host knows its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_engine.backends.batch import KVSpan
from mlx_engine.errors import CacheFullError

if TYPE_CHECKING:
    from mlx_engine.cache.pool import KVPool


class KVSequence:
    """The page table of each group of layers, and the length. Made by `KVPool.sequence`.

    Attributes:
        pool: the pool of its pages.
        length: number of committed tokens, which is the position of the next token.
        pending: number of tokens that were begun and neither committed nor rolled back.
        capacity: the largest number of tokens.
    """

    def __init__(self, pool: KVPool, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 token, found {capacity}")
        self.pool, self.capacity = pool, capacity
        self.length = self.pending = 0
        n_pages = -(-capacity // pool.page)
        self._tables = [np.full(n_pages, -1, dtype=np.int64) for _ in pool.windows]
        # Entries [first, end) of a table are allocated pages; `end` is the same for all tables.
        self._firsts, self._end = [0] * len(pool.windows), 0

    @property
    def n_pages(self) -> int:
        """Number of allocated pages, in all groups."""
        return sum(self._end - first for first in self._firsts)

    def begin(self, n: int) -> int:
        """Allocate pages for n more tokens, which are then pending, and return the position of the first.

        Raises:
            CacheFullError: the capacity is exceeded, or the pool has too few free pages; nothing has changed.
        """
        if n < 1:
            raise ValueError(f"begin: expected at least one token, found {n}")
        first = self.length + self.pending
        if first and not self.pool.stores.are_kept:
            raise ValueError("begin: expected one pass over a pool whose stores are not kept, found a second one")
        if first + n > self.capacity:
            raise CacheFullError(length=first, wanted=n, capacity=self.capacity)
        end = max(self._end, -(-(first + n) // self.pool.page))
        more = end - self._end
        for group in range(len(self._tables)):
            if self.pool.free_pages(group) < more:
                free = self.pool.free_pages(group) * self.pool.page
                capacity = self._end * self.pool.page + free
                raise CacheFullError(length=first, wanted=n, capacity=capacity, pool_is_full=True)
        if more:
            for group, table in enumerate(self._tables):
                table[self._end : end] = self.pool.take(group, more)
            self._end = end
        self.pending += n
        return first

    def commit(self, n: int) -> None:
        """Commit the first n pending tokens, and free pages that have left the window."""
        self._check("commit", n)
        self.pending -= n
        self.length += n
        for group, window in enumerate(self.pool.windows):
            if window is not None:
                self._give_back(group, max(0, self.length + 1 - window) // self.pool.page)

    def roll_back(self, n: int) -> None:
        """Discard the last n pending tokens, and free their pages."""
        self._check("roll_back", n)
        self.pending -= n
        self._free_end()

    def truncate(self, length: int) -> None:
        """Discard the tokens from position `length` on, and free their pages.

        Raises:
            ValueError: the sequence is shorter, has pending tokens, or has already freed pages that would be inside a
                layer's window again.
        """
        if not 0 <= length <= self.length or self.pending:
            raise ValueError(f"truncate: expected at most {self.length} tokens and none pending, found {length}")
        for group, window in enumerate(self.pool.windows):
            if window is not None and self._firsts[group] * self.pool.page > max(0, length + 1 - window):
                raise ValueError(f"truncate: tokens that a window of {window} sees after {length} have been given back")
        self.length = length
        self._free_end()

    def close(self) -> None:
        """Free all pages and discard all tokens. The sequence is empty and can be used again.

        Raises:
            ValueError: tokens are pending: their pass could still write to the pages.
        """
        if self.pending:
            raise ValueError(f"close: expected no pending tokens, found {self.pending}; commit or roll back their pass")
        for group in range(len(self._tables)):
            self._give_back(group, self._end)
        self._firsts, self._end = [0] * len(self._tables), 0
        self.length = 0

    def span(self, group: int, length: int, n_new: int) -> KVSpan:
        """Return the page table of a group for a pass: `length` tokens, of which the last `n_new` are new."""
        return KVSpan(self._tables[group], length, n_new)

    def slots(self, group: int, first: int, n: int) -> np.ndarray:
        """Return the slots (n,) int64 of positions [first, first + n) in a group of layers."""
        table, page = self._tables[group], self.pool.page
        if n == 1:
            return table[first // page : first // page + 1] + first % page
        positions = np.arange(first, first + n)
        return table[positions // page] + positions % page

    def _give_back(self, group: int, end: int) -> None:
        """Free the pages before page `end` of a group."""
        first = self._firsts[group]
        if end > first:
            self.pool.give_back(group, self._tables[group][first:end].copy())
            self._tables[group][first:end] = -1
            self._firsts[group] = end

    def _free_end(self) -> None:
        """Free the pages after the last token."""
        end = -(-(self.length + self.pending) // self.pool.page)
        if end < self._end:
            for group, table in enumerate(self._tables):
                self.pool.give_back(group, table[end : self._end].copy())
                table[end : self._end] = -1
            self._end = end

    def _check(self, what: str, n: int) -> None:
        if not 0 <= n <= self.pending:
            raise ValueError(f"{what}: expected at most the {self.pending} tokens that were begun, found {n}")
