"""The bytes of a KV cache, computed from a model's config without allocating memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.cache.pool import LONGEST_PASS, PAGE, KVLayer, pages_for

BYTES_PER_FLOAT = 4


@dataclass(frozen=True)
class CacheSize:
    """The size of float32 keys and values of one sequence of up to `n_tokens` tokens.

    Attributes:
        layers: the shape of each layer's KV cache.
        page: tokens per page.
        longest_pass: the largest number of new tokens in one pass.
    """

    layers: Sequence[KVLayer]
    n_tokens: int
    page: int = PAGE
    longest_pass: int = LONGEST_PASS

    @property
    def whole(self) -> int:
        """Bytes if every layer kept every token, without unused slots in pages."""
        return sum(_bytes_per_token(layer) * self.n_tokens for layer in self.layers)

    @property
    def held(self) -> int:
        """Bytes of the pages of a pool for one such sequence; layers with a window have fewer pages."""
        return sum(_bytes_per_token(layer) * self.page * self._pages(layer.window) for layer in self.layers)

    @property
    def saved(self) -> int:
        """Bytes that windows save."""
        return sum(
            _bytes_per_token(layer) * self.page * (self._pages(None) - self._pages(layer.window))
            for layer in self.layers
        )

    @property
    def n_windows(self) -> int:
        """Number of layers with a window."""
        return sum(layer.window is not None for layer in self.layers)

    def _pages(self, window: int | None) -> int:
        return pages_for(window, self.n_tokens, 1, self.page, self.longest_pass)


def _bytes_per_token(layer: KVLayer) -> int:
    return 2 * layer.n_kv_heads * layer.head_dim * BYTES_PER_FLOAT


def tokens_that_fit(layers: Sequence[KVLayer], nbytes: int, n_sequences: int = 1) -> int:
    """Return the largest number of tokens whose pool is within `nbytes` (to be replaced by the exact count)."""
    return nbytes // sum(_bytes_per_token(layer) for layer in layers)
