"""The memory of all keys and values: a fixed number of pages, handed out to sequences and taken back.

A page holds `page` tokens. Layers with one window form a group, and a page belongs to one group: it is the same run of
slots in the store of each layer of the group. Appending writes to a page; nothing is ever copied or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Stores
from mlx_engine.cache.sequence import KVSequence

# Tokens of a page, unless the caller says otherwise.
PAGE = 64
# Tokens of the longest forward pass that layers with a window have pages for, unless the caller says otherwise.
LONGEST_PASS = 512


@dataclass(frozen=True)
class KVLayer:
    """What a layer keeps of each token: keys and values of `n_kv_heads` heads of `head_dim`, within a `window`."""

    n_kv_heads: int
    head_dim: int
    window: int | None = None


class KVPool:
    """Pages for the keys and values of up to `n_sequences` sequences, of `n_tokens` tokens together.

    Attributes:
        stores: the memory, as a forward pass takes it.
        windows: the window of each group of layers.
        page: tokens of a page.
        n_tokens: how many tokens there is memory for.
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
        """Ask for the memory.

        Args:
            backend: keeps the stores.
            layers: what each layer keeps.
            n_tokens: of all sequences together.
            n_sequences: how many there are at most at the same time.
            page: tokens of a page.
            longest_pass: the most new tokens of a sequence in one forward pass, for layers with a window.
            kept: whether a later pass reads what an earlier one has written. Else all layers of a group write to the
                same memory: enough for a pass that brings its whole sequence.
        """
        if min(n_tokens, n_sequences, page, longest_pass) < 1:
            raise ValueError(
                "expected at least one token, sequence, token of a page and token of a pass, found "
                f"{n_tokens}, {n_sequences}, {page} and {longest_pass}"
            )
        self._backend, self.n_tokens, self.page = backend, n_tokens, page
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(layer.window for layer in layers))
        pages = [pages_for(window, n_tokens, n_sequences, page, longest_pass) for window in self.windows]
        group_of = [self.windows.index(layer.window) for layer in layers]
        shared: dict[KVLayer, object] = {}
        stores = []
        for layer, group in zip(layers, group_of, strict=True):
            if kept or layer not in shared:
                shared[layer] = backend.kv_empty(layer.n_kv_heads, layer.head_dim, pages[group] * page)
            stores.append(shared[layer])
        self.stores = Stores(stores, group_of, page, kept)
        # Of each group, the first slots of free pages; the next to be handed out comes last.
        self._free = [np.arange(n - 1, -1, -1, dtype=np.int64) * page for n in pages]
        self._n_free = pages

    def sequence(self, capacity: int | None = None) -> KVSequence:
        """Return an empty sequence of at most `capacity` tokens; None is as many as there is memory for."""
        return KVSequence(self, self.n_tokens if capacity is None else capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        layers = self.stores.layers if self.stores.are_kept else list({id(s): s for s in self.stores.layers}.values())
        return sum(self._backend.kv_nbytes(store) for store in layers)

    def free_pages(self, group: int) -> int:
        """Return how many pages of a group nobody holds."""
        return self._n_free[group]

    def take(self, group: int, n: int) -> np.ndarray:
        """Return the first slots (n,) of n free pages, which there must be; they are the caller's from now on."""
        last = self._n_free[group]
        self._n_free[group] = last - n
        return self._free[group][last - n : last][::-1].copy()

    def give_back(self, group: int, pages: np.ndarray) -> None:
        """Take pages back, given their first slots (n,) in the order in which they were held."""
        first = self._n_free[group]
        self._free[group][first : first + len(pages)] = pages[::-1]
        self._n_free[group] = first + len(pages)


def pages_for(window: int | None, n_tokens: int, n_sequences: int, page: int, longest_pass: int) -> int:
    """Return how many pages a group of layers needs for sequences of `n_tokens` tokens together.

    The last page of a sequence may have one token. With a window, pages are given back as soon as no later token sees
    any of their tokens; one more may have tokens on both sides of the window's edge.
    """
    all_pages = -(-n_tokens // page) + n_sequences - 1
    if window is None:
        return all_pages
    return min(all_pages, n_sequences * (-(-(window - 1 + longest_pass) // page) + 1))
