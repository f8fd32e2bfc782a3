"""The pages that a prefix cache holds, counted apart from those of sequences: which are in use, and how many bytes."""

from __future__ import annotations

import numpy as np

from mlx_engine.cache.pool import KVPool


class HeldPages:
    """The references of one holder to pages of a pool; several of its nodes may refer to the same page.

    Pages are given by their first slots (n,), different ones; entries of -1 are skipped.

    Attributes:
        pool: the pool of the pages.
        n_pages: the number of different pages held in each group.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.n_pages = [0] * len(pool.windows)
        self._counts = [np.zeros(n, dtype=np.int64) for n in pool.n_pages]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages held, in float32."""
        return sum(n * of_page for n, of_page in zip(self.n_pages, self.pool.page_nbytes, strict=True))

    def add(self, group: int, pages: np.ndarray) -> None:
        """Add a reference to pages of a group, which are in use."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        self.n_pages[group] += int((counts[numbers] == 0).sum())
        counts[numbers] += 1
        self.pool.retain(group, pages)

    def drop(self, group: int, pages: np.ndarray) -> None:
        """Remove a reference from pages of a group; those that nobody holds are free then."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        counts[numbers] -= 1
        self.n_pages[group] -= int((counts[numbers] == 0).sum())
        self.pool.give_back(group, pages)

    def in_use(self, group: int, pages: np.ndarray) -> np.ndarray:
        """Return which of the pages (n,) of a group, all held here, are held by a sequence too."""
        held: np.ndarray = self._counts[group][pages // self.pool.page]
        return np.asarray(self.pool.references(group, pages) > held)

    def unused(self, group: int) -> int:
        """Return the number of pages of a group that are held here and by no sequence."""
        counts, page = self._counts[group], self.pool.page
        (numbers,) = counts.nonzero()
        return int((self.pool.references(group, numbers * page) == counts[numbers]).sum())
