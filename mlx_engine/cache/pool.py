"""The KV pool: the memory for the keys and values of all sequences, divided into pages.

A KV store is the memory for the keys and values of a layer, with a slot for each token. Layers with the same attention
window form a group, and each group has its own pages. A page is a range of consecutive slots, the same in the KV stores
of all layers of the group. Several sequences and a prefix cache may hold the same page, so pages are reference-counted;
a page without a reference is free. Recurrent states are not in pages, but in the slots of a `StatePool` (`states.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Stores
from mlx_engine.backends.parameters import Array
from mlx_engine.cache.sequence import KVSequence
from mlx_engine.cache.states import StateLayer, StatePool, n_slots
from mlx_engine.quant.key_values import row_nbytes

# Default number of tokens per page.
PAGE = 64
# Default of `longest_pass`, the largest number of new tokens of a sequence in one forward pass.
LONGEST_PASS = 512
# The default limit of `tokens_that_fit`. If all layers have windows, a long sequence needs no more pages than a shorter
# one, so without this limit any number of tokens would fit.
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class KVLayer:
    """The properties of one layer's KV cache.

    Attributes:
        window: the attention window, see `first_visible` in `backends/batch.py`; None if the layer has no window.
        type: the type in which keys and values are stored.
        n_arrays: 2 for keys and values. 1 for multi-head latent attention, which stores only keys (the latents). The
            first elements of such a key are also the value.
        state: the recurrent state of a second token mixer (such as Mamba2) beside the attention; None if the layer has
            only attention.
    """

    n_kv_heads: int
    head_dim: int
    window: int | None = None
    type: str = "f32"
    n_arrays: int = 2
    state: StateLayer | None = None

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.n_arrays * self.n_kv_heads * row_nbytes(self.head_dim, self.type)


# The cache of a layer: keys and values (perhaps with a recurrent state), or only a recurrent state. A layer without a
# token mixer has a `StateLayer` without arrays.
CacheLayer: TypeAlias = KVLayer | StateLayer


class KVPool:
    """The memory for the keys, values and states of up to `n_sequences` sequences, with `n_tokens` tokens in total.

    Attributes:
        windows: the window of each group of layers.
        n_pages: the number of pages of each group, free or in use.
        page_nbytes: for each group, the bytes of one page in all layers of the group.
        reclaim: a function that the prefix cache sets, or None. If a sequence needs n pages of a group and fewer are
            free, `reclaim(group, n)` is called to free cached pages.

    Args:
        n_sequences: the largest number of sequences at a time. A prefix cache can use the pages that sequences do not
            use.
        page: tokens per page.
        longest_pass: the largest number of new tokens of a sequence in one pass. The number of pages of layers with a
            window depends on this number.
        kept: whether later passes read the keys and values of earlier passes. If not, layers with the same `KVLayer`
            share one store, in which each layer overwrites the keys and values of the previous layer.
        n_proposed: the largest number of proposed tokens (see `loop/speculation.py`) of all sequences in a pass. A
            model with states needs one more slot of its `StatePool` for each of these tokens.
        adapter: the adapter of new sequences, see `KVSequence.adapter`.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[CacheLayer],
        n_tokens: int,
        *,
        n_sequences: int = 1,
        page: int = PAGE,
        longest_pass: int = LONGEST_PASS,
        kept: bool = True,
        n_proposed: int = 0,
        adapter: int = 0,
    ) -> None:
        if min(n_tokens, n_sequences, page, longest_pass) < 1:
            raise ValueError(
                "expected n_tokens, n_sequences, page and longest_pass of at least 1, found "
                f"{n_tokens}, {n_sequences}, {page} and {longest_pass}"
            )
        self.backend, self.layers = backend, tuple(layers)
        self.n_tokens, self.page, self.longest_pass = n_tokens, page, longest_pass
        self.adapter = adapter
        with_kv = kv_layers(layers)
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(layer.window for layer in with_kv))
        pages = [pages_for(window, n_tokens, n_sequences, page, longest_pass) for window in self.windows]
        group_of = [self.windows.index(layer.window) if isinstance(layer, KVLayer) else -1 for layer in layers]
        shared: dict[KVLayer, Array] = {}
        stores: list[Array | None] = []
        for layer, group in zip(layers, group_of, strict=True):
            if isinstance(layer, KVLayer) and (kept or layer not in shared):
                shared[layer] = backend.kv_empty(layer.n_kv_heads, layer.head_dim, pages[group] * page, layer.n_arrays)
            stores.append(shared[layer] if isinstance(layer, KVLayer) else None)
        self.states = StatePool(
            backend, [state_of(layer) for layer in layers], n_sequences, kept=kept, n_proposed=n_proposed
        )
        self.stores = Stores(stores, group_of, page, kept, self.states.stores)
        self.n_pages = tuple(pages)
        self.page_nbytes = tuple(
            page * sum(layer.token_nbytes for layer in with_kv if layer.window == window) for window in self.windows
        )
        self.reclaim: Callable[[int, int], object] | None = None
        # For each group: a stack with the first slot of each free page, the number of pages on the stack, and the
        # reference count of each page.
        self._free = [np.arange(n - 1, -1, -1, dtype=np.int64) * page for n in pages]
        self._n_free = pages
        self._references = [np.zeros(n, dtype=np.int64) for n in pages]

    def sequence(self, capacity: int | None = None) -> KVSequence:
        """Return an empty sequence of at most `capacity` tokens, by default as many as the pool holds."""
        return KVSequence(self, self.n_tokens if capacity is None else capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and of all slots of states, free or in use."""
        different = {id(store): store for store in self.stores.layers if store is not None}.values()
        return sum(self.backend.kv_nbytes(store) for store in different) + self.states.nbytes

    def free_pages(self, group: int) -> int:
        """Return the number of free pages of a group."""
        return self._n_free[group]

    def used_pages(self, group: int) -> int:
        """Return the number of pages of a group that are held by a sequence or a prefix cache."""
        return self.n_pages[group] - self._n_free[group]

    def references(self, group: int, pages: np.ndarray) -> np.ndarray:
        """Return the reference counts (n,) of pages of a group, given the first slots (n,) of the pages."""
        return np.asarray(self._references[group][pages // self.page])

    def make_room(self, needs: Sequence[int]) -> bool:
        """Reclaim cached pages until each group has as many free pages as it needs; return whether this succeeded."""
        if self.reclaim is not None:
            for group, need in enumerate(needs):
                if self._n_free[group] < need:
                    self.reclaim(group, need)
        return all(free >= need for free, need in zip(self._n_free, needs, strict=True))

    def take(self, group: int, n: int) -> np.ndarray:
        """Allocate n of a group's free pages, with one reference each, and return their first slots (n,)."""
        last = self._n_free[group]
        self._n_free[group] = last - n
        pages = self._free[group][last - n : last][::-1].copy()
        self._references[group][pages // self.page] = 1
        return pages

    def retain(self, group: int, pages: np.ndarray) -> None:
        """Add one reference to each of n distinct pages that are in use, given their first slots (n,)."""
        self._references[group][pages // self.page] += 1

    def give_back(self, group: int, pages: np.ndarray) -> None:
        """Remove one reference from each of n distinct pages, and free the pages whose count is then 0.

        `pages` has the first slots (n,) of the pages, in the order of the page table.

        Raises:
            ValueError: one of the pages is free. Then nothing has changed.
        """
        references, numbers = self._references[group], pages // self.page
        left = references[numbers] - 1
        if (left < 0).any():
            raise ValueError(f"give_back: expected pages that are in use, found free ones among {numbers.tolist()}")
        references[numbers] = left
        freed = pages if not left.any() else pages[left == 0]
        first = self._n_free[group]
        self._free[group][first : first + len(freed)] = freed[::-1]
        self._n_free[group] = first + len(freed)

    def copy(self, group: int, source: int, target: int, n: int) -> None:
        """Copy a page's first n tokens to another page, in all layers of a group, given the pages' first slots."""
        layers = self.stores.layers
        for i, of in enumerate(self.stores.group_of):
            if of == group:
                layers[i] = self.backend.kv_copy(layers[i], source, target, n)


def state_of(layer: CacheLayer) -> StateLayer | None:
    """Return the array shapes of a layer's recurrent state; None if the layer has no state."""
    state = layer if isinstance(layer, StateLayer) else layer.state
    return state if state is not None and state.shapes else None


def kv_layers(layers: Sequence[CacheLayer]) -> list[KVLayer]:
    """Return the layers that have keys and values."""
    return [layer for layer in layers if isinstance(layer, KVLayer)]


def pages_for(window: int | None, n_tokens: int, n_sequences: int, page: int, longest_pass: int) -> int:
    """Return the number of pages that a group of layers needs for sequences with `n_tokens` tokens in all.

    Without a window, each sequence may have a partly filled last page. So the sequences need at most `n_sequences - 1`
    more pages than one sequence of `n_tokens` tokens. With a window of W tokens, or chunks of W tokens (stored as the
    window -W, see `first_visible`), a sequence keeps at most `W - 1 + longest_pass` tokens. The first of these tokens
    may be anywhere in its page, so each sequence needs one page more than these tokens would fill from a page's start.
    All sequences together need at most as many pages as without a window.
    """
    all_pages = -(-n_tokens // page) + n_sequences - 1
    if window is None:
        return all_pages
    return min(all_pages, n_sequences * (-(-(abs(window) - 1 + longest_pass) // page) + 1))


# ---- sizes, without an allocation ----


def pool_nbytes(
    layers: Sequence[CacheLayer],
    n_tokens: int,
    n_sequences: int = 1,
    page: int = PAGE,
    longest_pass: int = LONGEST_PASS,
) -> int:
    """Return the bytes of a `KVPool` with these parameters, without slots for the states after proposed tokens."""
    pages = sum(
        layer.token_nbytes * page * pages_for(layer.window, n_tokens, n_sequences, page, longest_pass)
        for layer in kv_layers(layers)
    )
    return pages + n_slots(n_sequences) * state_nbytes(layers)


def state_nbytes(layers: Sequence[CacheLayer]) -> int:
    """Return the bytes of the recurrent states of one sequence, in all layers together."""
    return sum(state.nbytes for state in map(state_of, layers) if state is not None)


def tokens_that_fit(
    layers: Sequence[CacheLayer],
    nbytes: int,
    n_sequences: int = 1,
    page: int = PAGE,
    longest_pass: int = LONGEST_PASS,
    *,
    most: int = MOST_TOKENS,
) -> int:
    """Return how many tokens, in whole pages, fit into a `KVPool` of `nbytes` bytes: 0 to `most`."""
    pages = range(-(-most // page) + 1)
    n = bisect_right(pages, nbytes, key=lambda n: pool_nbytes(layers, n * page, n_sequences, page, longest_pass)) - 1
    return min(max(n, 0) * page, most)


@dataclass(frozen=True)
class CacheSize:
    """The size of the cache of one sequence of up to `n_tokens` tokens; the fields are as in `KVPool`."""

    layers: Sequence[CacheLayer]
    n_tokens: int
    page: int = PAGE
    longest_pass: int = LONGEST_PASS

    @property
    def whole(self) -> int:
        """Bytes of the keys, values and states if every layer kept every token, and no page had unused slots."""
        return sum(layer.token_nbytes * self.n_tokens for layer in kv_layers(self.layers)) + self.state

    @property
    def state(self) -> int:
        """Bytes of the recurrent states, which do not grow with the sequence."""
        return state_nbytes(self.layers)

    @property
    def held(self) -> int:
        """Bytes of a pool for one sequence, in which layers with a window have fewer pages."""
        return pool_nbytes(self.layers, self.n_tokens, 1, self.page, self.longest_pass)

    @property
    def saved(self) -> int:
        """Bytes by which a pool is smaller because some layers have windows."""
        without = [replace(layer, window=None) if isinstance(layer, KVLayer) else layer for layer in self.layers]
        return pool_nbytes(without, self.n_tokens, 1, self.page, self.longest_pass) - self.held

    @property
    def n_windows(self) -> int:
        """Number of layers with a window."""
        return sum(layer.window is not None for layer in kv_layers(self.layers))
