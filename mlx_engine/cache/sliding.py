"""A window over the latest tokens is remembered, in slots that are used again and again: memory has a bound.

Attention wants its slots in a row and in order, so what is still needed slides to the front when the last slot has
been used, where a ring would go on at its first. That copies less than a window for every `step` tokens, and a pass
that is interrupted has overwritten nothing.
"""

from __future__ import annotations

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Visible
from mlx_engine.cache.base import Cache
from mlx_engine.errors import CacheFullError

# Tokens that are kept before the window, so that as many can be forgotten without losing what comes into sight again.
SPARE = 8

# Tokens for which there are slots behind the window: so many passes of one token go by before anything is moved.
STEP = 256


def slots_for(capacity: int, window: int, n: int) -> int:
    """Slots of a layer through which passes of up to n tokens go."""
    return min(capacity, window - 1 + SPARE + n)


class SlidingCache(Cache):
    """Each token sees the last `window` tokens, itself included; a store per layer, all of one size.

    There are as many slots as the longest pass needs, and at least as many as one of `step` tokens does.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        capacity: int,
        window: int,
        step: int = STEP,
    ) -> None:
        if capacity < 1 or window < 1 or step < 1:
            raise ValueError(
                f"expected a capacity, a window and a step of at least 1, found {capacity}, {window} and {step}"
            )
        self._backend, self._capacity, self._window, self._step = backend, capacity, window, step
        self._stores: list[Array] = [backend.kv_empty(n_kv_heads, head_dim, 0) for _ in range(n_layers)]
        # The last `held` of `length` tokens are in the slots [0, held).
        self._length = self._held = self._slots = 0

    @property
    def length(self) -> int:
        """Tokens seen, which is the position of the next one; only the last of them are still in the stores."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that it can count at most."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the stores, filled or not."""
        return sum(self._backend.kv_nbytes(store) for store in self._stores)

    def reserve(self, n: int) -> int:
        """Make the stores as large as the pass needs, once; then slide whenever the slots are used up."""
        if n < 1:
            raise ValueError(f"reserve: expected at least one token, found {n}")
        if self._length + n > self._capacity:
            raise CacheFullError(length=self._length, wanted=n, capacity=self._capacity)
        kept = self._window - 1 + SPARE
        slots = slots_for(self._capacity, self._window, max(n, self._step))
        if self._held + n > self._slots and slots > self._slots:
            self._stores = [self._backend.kv_grow(store, slots) for store in self._stores]
            self._slots = slots
        if self._held + n > self._slots:
            first = self._held - kept
            self._stores = [self._backend.kv_slide(store, first, kept) for store in self._stores]
            self._held = kept
        return self._length

    def append(self, layer: int, k: Array, v: Array) -> Visible:
        """Write behind what is held; each token sees its window."""
        self._check("append", len(k))
        self._stores[layer] = self._backend.kv_write(self._stores[layer], self._held, k, v)
        return self._visible(self._stores[layer], len(k))

    def kv_views(self, n: int) -> list[Visible]:
        """The slots behind what is held."""
        self._check("kv_views", n)
        return [self._visible(store, n) for store in self._stores]

    def advance(self, n: int) -> None:
        """Count n more tokens, for which there must be slots."""
        if n < 0:
            raise ValueError(f"advance: expected a number of tokens >= 0, found {n}")
        self._check("advance", n)
        self._held += n
        self._length += n

    def trim(self, n: int) -> int:
        """The slots stay; all tokens are forgotten where some that come into sight again are no longer held.

        They are, down to `SPARE` tokens less than there have ever been.
        """
        if n < 0:
            raise ValueError(f"trim: expected a number of tokens >= 0, found {n}")
        length, held = self._length - n, self._held - n
        if held < min(length, self._window - 1):
            length = held = 0
        forgotten = self._length - max(0, length)
        self._length, self._held = self._length - forgotten, max(0, held)
        return forgotten

    def _visible(self, store: Array, n: int) -> Visible:
        first = self._length - self._held
        return Visible(store, max(0, self._held + 1 - self._window), self._held + n, self._window, first)

    def _check(self, what: str, n: int) -> None:
        if self._held + n > self._slots:
            raise ValueError(f"{what}: expected at most the {self._slots - self._held} slots left, found {n}")
