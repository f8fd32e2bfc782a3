"""Nothing is remembered: a pass sees its own tokens alone. The rung of the ladder below every cache."""

from __future__ import annotations

import sys

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Visible
from mlx_engine.cache.base import Cache


class NoCache(Cache):
    """Each pass must bring the whole sequence; with a `window`, a token sees the last of it alone."""

    def __init__(self, backend: Backend, *, n_kv_heads: int, head_dim: int, window: int | None = None) -> None:
        self._backend, self._n_kv_heads, self._head_dim, self._window = backend, n_kv_heads, head_dim, window

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    @property
    def capacity(self) -> int:
        """A pass may be as long as memory allows."""
        return sys.maxsize

    @property
    def nbytes(self) -> int:
        """Always 0: what a pass needs is gone after it."""
        return 0

    def reserve(self, n: int) -> int:
        """Every pass starts at position 0."""
        return 0

    def append(self, layer: int, k: Array, v: Array) -> Visible:
        """A store for this call alone."""
        store = self._backend.kv_empty(self._n_kv_heads, self._head_dim, len(k))
        return Visible(self._backend.kv_write(store, 0, k, v), 0, len(k), self._window)

    def advance(self, n: int) -> None:
        """Nothing to count."""

    def trim(self, n: int) -> int:
        """Nothing to forget."""
        return 0
