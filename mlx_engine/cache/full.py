"""Every token is remembered. Memory grows in steps, or is there at once where that costs nothing."""

from __future__ import annotations

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Visible
from mlx_engine.cache.base import Cache
from mlx_engine.errors import CacheFullError


class FullCache(Cache):
    """A store per layer, all of one size, grown by whole steps of slots up to `capacity`.

    Without a `step` it is the backend's own.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        capacity: int,
        step: int | None = None,
    ) -> None:
        if step is None:
            step = backend.kv_step or capacity
        if capacity < 1 or step < 1:
            raise ValueError(f"expected a capacity and a step of at least 1, found {capacity} and {step}")
        self._backend, self._capacity, self._step = backend, capacity, step
        self._stores: list[Array] = [backend.kv_empty(n_kv_heads, head_dim, 0) for _ in range(n_layers)]
        self._length = self._slots = 0

    @property
    def length(self) -> int:
        """Tokens that are remembered."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that it can remember at most."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the stores, filled or not."""
        return sum(self._backend.kv_nbytes(store) for store in self._stores)

    def reserve(self, n: int) -> int:
        """Grow all layers to the next step, if need be."""
        if n < 1:
            raise ValueError(f"reserve: expected at least one token, found {n}")
        wanted = self._length + n
        if wanted > self._capacity:
            raise CacheFullError(length=self._length, wanted=n, capacity=self._capacity)
        if wanted > self._slots:
            slots = min(-(-wanted // self._step) * self._step, self._capacity)
            self._stores = [self._backend.kv_grow(store, slots) for store in self._stores]
            self._slots = slots  # last: an interrupted growth leaves everything as it was
        return self._length

    def append(self, layer: int, k: Array, v: Array) -> Visible:
        """Write behind what is remembered; all of it is visible."""
        if self._length + len(k) > self._slots:
            raise ValueError(f"append: expected at most the {self._slots - self._length} slots left, found {len(k)}")
        self._stores[layer] = self._backend.kv_write(self._stores[layer], self._length, k, v)
        return Visible(self._stores[layer], 0, self._length + len(k))

    def kv_views(self, n: int) -> list[Visible]:
        """The slots behind what is remembered; all before them are visible."""
        if self._length + n > self._slots:
            raise ValueError(f"kv_views: expected at most the {self._slots - self._length} slots left, found {n}")
        return [Visible(store, 0, self._length + n) for store in self._stores]

    def advance(self, n: int) -> None:
        """Count n more tokens, for which there must be slots."""
        if not 0 <= n <= self._slots - self._length:
            raise ValueError(f"advance: expected at most the {self._slots - self._length} slots left, found {n}")
        self._length += n

    def trim(self, n: int) -> int:
        """The slots stay; the next tokens overwrite them."""
        if n < 0:
            raise ValueError(f"trim: expected a number of tokens >= 0, found {n}")
        forgotten = min(n, self._length)
        self._length -= forgotten
        return forgotten
