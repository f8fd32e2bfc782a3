"""The keys and values of one sequence: which pages of a pool hold them, and how many tokens count.

A forward pass of n tokens is `begin(n)`, which finds pages for them, then `commit(n)`, or `roll_back(n)` if it failed
or if its tokens turned out to be others. Several passes may be begun before the first is committed: a lazy backend
begins a pass before the token that it reads has been seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_engine.backends.batch import KVSpan
from mlx_engine.errors import CacheFullError

if TYPE_CHECKING:
    from mlx_engine.cache.pool import KVPool


class KVSequence:
    """A page table for each group of layers, and a length. Made by `KVPool.sequence`.

    Attributes:
        pool: whose pages it holds.
        length: tokens that count, which is also the position of the next one.
        pending: tokens that were begun and neither committed nor rolled back.
        capacity: tokens that it can hold at most.
    """

    def __init__(self, pool: KVPool, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 token, found {capacity}")
        self.pool, self.capacity = pool, capacity
        self.length = self.pending = 0
        n_pages = -(-capacity // pool.page)
        self._tables = [np.full(n_pages, -1, dtype=np.int64) for _ in pool.windows]
        # Pages [first, end) of a table are held; all tables end with the same page.
        self._firsts, self._end = [0] * len(pool.windows), 0

    @property
    def n_pages(self) -> int:
        """Pages that it holds, of all groups together."""
        return sum(self._end - first for first in self._firsts)

    def begin(self, n: int) -> int:
        """Find pages for n more tokens and return the position of the first.

        Raises:
            CacheFullError: they are more than its capacity, or the pool has too few free pages; nothing has changed.
        """
        if n < 1:
            raise ValueError(f"begin: expected at least one token, found {n}")
        first = self.length + self.pending
        if first + n > self.capacity:
            raise CacheFullError(length=first, wanted=n, capacity=self.capacity)
        end = max(self._end, -(-(first + n) // self.pool.page))
        more = end - self._end
        for group in range(len(self._tables)):
            if self.pool.free_pages(group) < more:
                free = self.pool.free_pages(group) * self.pool.page
                raise CacheFullError(length=first, wanted=n, capacity=self._end * self.pool.page + free)
        if more:
            for group, table in enumerate(self._tables):
                table[self._end : end] = self.pool.take(group, more)
            self._end = end
        self.pending += n
        return first

    def commit(self, n: int) -> None:
        """Count the first n of the tokens that were begun; pages that no later token sees are given back."""
        self._check("commit", n)
        self.pending -= n
        self.length += n
        for group, window in enumerate(self.pool.windows):
            if window is not None:
                self._give_back(group, max(0, self.length + 1 - window) // self.pool.page)

    def roll_back(self, n: int) -> None:
        """Forget the last n of the tokens that were begun. Their pages stay, for those that come instead."""
        self._check("roll_back", n)
        self.pending -= n

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; pages stay, for those that come instead.

        Raises:
            ValueError: there are fewer tokens, some are begun and not committed, or a layer with a window has given
                tokens back that it would see again.
        """
        if not 0 <= length <= self.length or self.pending:
            raise ValueError(f"truncate: expected at most {self.length} tokens and none pending, found {length}")
        for group, window in enumerate(self.pool.windows):
            if window is not None and self._firsts[group] * self.pool.page > max(0, length + 1 - window):
                raise ValueError(f"truncate: tokens that a window of {window} sees after {length} have been given back")
        self.length = length

    def close(self) -> None:
        """Give all pages back, and forget all tokens. The sequence may begin again."""
        for group in range(len(self._tables)):
            self._give_back(group, self._end)
        self._firsts, self._end = [0] * len(self._tables), 0
        self.length = self.pending = 0

    def span(self, group: int, length: int, n_new: int) -> KVSpan:
        """Return what a pass sees of it in a group of layers: `length` tokens, the last `n_new` of them new."""
        return KVSpan(self._tables[group], length, n_new)

    def slots(self, group: int, first: int, n: int) -> np.ndarray:
        """Return the slots (n,) int64 of positions [first, first + n) in a group of layers."""
        table, page = self._tables[group], self.pool.page
        if n == 1:
            return table[first // page : first // page + 1] + first % page
        positions = np.arange(first, first + n)
        return table[positions // page] + positions % page

    def _give_back(self, group: int, end: int) -> None:
        """Give back the pages before page `end` of a group."""
        first = self._firsts[group]
        if end > first:
            self.pool.give_back(group, self._tables[group][first:end].copy())
            self._tables[group][first:end] = -1
            self._firsts[group] = end

    def _check(self, what: str, n: int) -> None:
        if not 0 <= n <= self.pending:
            raise ValueError(f"{what}: expected at most the {self.pending} tokens that were begun, found {n}")
