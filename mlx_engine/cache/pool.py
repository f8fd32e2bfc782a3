"""The KV pool: the memory of all keys and values, as a fixed number of pages that sequences take and give back.

Layers with the same attention window form a group, and each group has its own pages. A page is `page` consecutive
slots, one per token, in the KV store of every layer of the group. Keys and values are written once and never moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Stores
from mlx_engine.backends.parameters import Array
from mlx_engine.cache.sequence import KVSequence

# Default number of tokens per page.
PAGE = 64
# Default for the largest number of new tokens of a sequence in one forward pass. For each sequence, a group with a
# window needs pages for the window and for these tokens.
LONGEST_PASS = 512


@dataclass(frozen=True)
class KVLayer:
    """The shape of one layer's KV cache: `n_kv_heads` heads of `head_dim`, and the window, None for all tokens."""

    n_kv_heads: int
    head_dim: int
    window: int | None = None


class KVPool:
    """Pages for up to `n_sequences` sequences with `n_tokens` tokens in total.

    Attributes:
        stores: the KV stores of all layers, for forward passes.
        windows: the window of each group of layers.
        page: tokens per page.
        n_tokens: tokens that fit into the pool.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[KVLayer],
        n_tokens: int,
        *,
        n_sequences: int = 1,
        page: int = PAGE,
        longest_pass: int = LONGEST_PASS,
        kept: bool = True,
    ) -> None:
        """Allocate the memory.

        Args:
            backend: allocates the KV stores.
            layers: the shape of each layer's KV cache.
            n_tokens: tokens of all sequences in total.
            n_sequences: the largest number of sequences at the same time.
            page: tokens per page.
            longest_pass: the largest number of new tokens of a sequence in one pass, for layers with a window.
            kept: whether later passes read the keys and values of earlier passes. If not, layers of the same
                shape and window share one store: each layer overwrites the keys and values of the layer before.
        """
        if min(n_tokens, n_sequences, page, longest_pass) < 1:
            raise ValueError(
                "expected n_tokens, n_sequences, page and longest_pass of at least 1, found "
                f"{n_tokens}, {n_sequences}, {page} and {longest_pass}"
            )
        self._backend, self.n_tokens, self.page = backend, n_tokens, page
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(layer.window for layer in layers))
        pages = [pages_for(window, n_tokens, n_sequences, page, longest_pass) for window in self.windows]
        group_of = [self.windows.index(layer.window) for layer in layers]
        shared: dict[KVLayer, Array] = {}
        stores = []
        for layer, group in zip(layers, group_of, strict=True):
            if kept or layer not in shared:
                shared[layer] = backend.kv_empty(layer.n_kv_heads, layer.head_dim, pages[group] * page)
            stores.append(shared[layer])
        self.stores = Stores(stores, group_of, page, kept)
        # For each group, a stack of free pages; a page is given by its first slot.
        self._free = [np.arange(n - 1, -1, -1, dtype=np.int64) * page for n in pages]
        self._n_free = pages

    def sequence(self, capacity: int | None = None) -> KVSequence:
        """Return an empty sequence of at most `capacity` tokens, by default as many as the pool holds."""
        return KVSequence(self, self.n_tokens if capacity is None else capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free or in use."""
        layers = self.stores.layers if self.stores.are_kept else list({id(s): s for s in self.stores.layers}.values())
        return sum(self._backend.kv_nbytes(store) for store in layers)

    def free_pages(self, group: int) -> int:
        """Return the number of free pages of a group."""
        return self._n_free[group]

    def take(self, group: int, n: int) -> np.ndarray:
        """Allocate n pages of a group and return the first slot of each, (n,). The group must have n free pages."""
        last = self._n_free[group]
        self._n_free[group] = last - n
        return self._free[group][last - n : last][::-1].copy()

    def give_back(self, group: int, pages: np.ndarray) -> None:
        """Return pages to a group's free pages; `pages` has the first slot of each, (n,), in the page table's order."""
        first = self._n_free[group]
        self._free[group][first : first + len(pages)] = pages[::-1]
        self._n_free[group] = first + len(pages)


def pages_for(window: int | None, n_tokens: int, n_sequences: int, page: int, longest_pass: int) -> int:
    """Return how many pages a group of layers needs for sequences of `n_tokens` tokens in total.

    Without a window: the last page of each sequence may be almost empty. So the sequences need at most
    `n_sequences - 1` pages more than one sequence of `n_tokens` tokens.
    With a window: a sequence keeps at most `window - 1 + longest_pass` tokens. The first of them may lie anywhere in
    its page, so each sequence needs one page more than these tokens fill.
    """
    all_pages = -(-n_tokens // page) + n_sequences - 1
    if window is None:
        return all_pages
    return min(all_pages, n_sequences * (-(-(window - 1 + longest_pass) // page) + 1))
