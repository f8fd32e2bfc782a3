"""What a key/value cache promises. One per request, owned by the caller; a model only appends and looks.

One pass of T tokens is: `offset = reserve(T)`, then `append` once per layer, or `kv_views` once, then `advance(T)`.
Nothing counts before `advance`: a pass that fails or is interrupted half-way leaves the cache as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mlx_engine.backends.parameters import Array, Visible


class Cache(ABC):
    """The keys and values of the tokens seen so far."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens that are remembered, which is also the position of the next one."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that it can remember at most."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def reserve(self, n: int) -> int:
        """Make room for n more tokens and return the position of the first.

        Raises:
            CacheFullError: they do not fit; nothing has changed.
        """

    @abstractmethod
    def append(self, layer: int, k: Array, v: Array) -> Visible:
        """Store a layer's (T, K, E) keys and values at the reserved place; what its queries may see."""

    def kv_views(self, n: int) -> Sequence[Visible] | None:
        """What each layer may see once n tokens are written at the reserved place, for who writes them himself.

        None where a layer's keys and values are no slots that one could write to.
        """
        return None

    @abstractmethod
    def advance(self, n: int) -> None:
        """The pass is complete in every layer: its n tokens count."""

    @abstractmethod
    def trim(self, n: int) -> int:
        """Forget the last n tokens, or as many as there are; returns how many were forgotten.

        It may be all of them: without the tokens that a window would show again, a cache can only begin anew. Whoever
        goes on does so from `length`.
        """
