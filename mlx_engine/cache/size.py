"""The bytes of a KV cache, computed from a model's config without allocating memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.cache.pool import LONGEST_PASS, PAGE, KVLayer, pages_for

# The default for `most` below: if all layers have windows, memory does not limit the number of tokens.
MOST_TOKENS = 1 << 24


def pool_nbytes(
    layers: Sequence[KVLayer],
    n_tokens: int,
    n_sequences: int = 1,
    page: int = PAGE,
    longest_pass: int = LONGEST_PASS,
) -> int:
    """Return the bytes of a `KVPool` with these parameters, in float32."""
    return sum(
        layer.token_nbytes * page * pages_for(layer.window, n_tokens, n_sequences, page, longest_pass)
        for layer in layers
    )


def tokens_that_fit(
    layers: Sequence[KVLayer],
    nbytes: int,
    n_sequences: int = 1,
    page: int = PAGE,
    longest_pass: int = LONGEST_PASS,
    *,
    most: int = MOST_TOKENS,
) -> int:
    """Return the largest `n_tokens` of a `KVPool` of at most `nbytes` bytes, a multiple of `page` unless it is `most`.

    Return 0 if not even one page of tokens fits.
    """
    pages = range(-(-most // page) + 1)
    n = bisect_right(pages, nbytes, key=lambda n: pool_nbytes(layers, n * page, n_sequences, page, longest_pass)) - 1
    return min(max(n, 0) * page, most)


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
        return sum(layer.token_nbytes * self.n_tokens for layer in self.layers)

    @property
    def held(self) -> int:
        """Bytes of the pages of a pool for one such sequence; layers with a window have fewer pages."""
        return pool_nbytes(self.layers, self.n_tokens, 1, self.page, self.longest_pass)

    @property
    def saved(self) -> int:
        """Bytes that windows save."""
        without = [KVLayer(layer.n_kv_heads, layer.head_dim) for layer in self.layers]
        return pool_nbytes(without, self.n_tokens, 1, self.page, self.longest_pass) - self.held

    @property
    def n_windows(self) -> int:
        """Number of layers with a window."""
        return sum(layer.window is not None for layer in self.layers)
