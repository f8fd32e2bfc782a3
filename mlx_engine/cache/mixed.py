"""Layers that remember differently, as one cache: some all tokens, some a window of them."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_engine.backends.parameters import Array, Visible
from mlx_engine.cache.base import Cache


class MixedCache(Cache):
    """`parts` go through every pass together; layer i of the model is the next layer of part `of[i]`."""

    def __init__(self, parts: Sequence[Cache], of: Sequence[int]) -> None:
        self._parts = list(parts)
        # Of each layer, its part and its place among that part's layers.
        self._places = [(part, list(of[:i]).count(part)) for i, part in enumerate(of)]

    @property
    def length(self) -> int:
        """Tokens that are remembered, by every part."""
        return self._parts[0].length

    @property
    def capacity(self) -> int:
        """That of the part that is full first."""
        return min(part.capacity for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts)

    def reserve(self, n: int) -> int:
        """In every part, the one that is full first before the others."""
        offset = 0
        for part in sorted(self._parts, key=lambda part: part.capacity):
            offset = part.reserve(n)
        return offset

    def append(self, layer: int, k: Array, v: Array) -> Visible:
        """In the layer's part."""
        part, place = self._places[layer]
        return self._parts[part].append(place, k, v)

    def kv_views(self, n: int) -> list[Visible] | None:
        """Those of each layer's part, if all parts have some."""
        views = [part.kv_views(n) for part in self._parts]
        known = [of for of in views if of is not None]
        return [known[part][place] for part, place in self._places] if len(known) == len(views) else None

    def advance(self, n: int) -> None:
        """In every part."""
        for part in self._parts:
            part.advance(n)

    def trim(self, n: int) -> int:
        """As many in every part as in the one that has to forget most."""
        length = self.length
        forgotten = max(part.trim(n) for part in self._parts)
        for part in self._parts:
            part.trim(part.length - (length - forgotten))
        return forgotten
