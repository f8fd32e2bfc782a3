"""The bytes of a KV cache, computed from a model's config without allocating memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_engine.cache.pool import LONGEST_PASS, PAGE, CacheLayer, KVLayer, kv_layers, pages_for, state_of
from mlx_engine.cache.states import n_slots

# Upper limit of the search in `tokens_that_fit`, because with windows in all layers the cache stops growing.
MOST_TOKENS = 1 << 24


def pool_nbytes(
    layers: Sequence[CacheLayer],
    n_tokens: int,
    n_sequences: int = 1,
    page: int = PAGE,
    longest_pass: int = LONGEST_PASS,
) -> int:
    """Return the bytes of a `KVPool` with these parameters."""
    pages = sum(
        layer.token_nbytes * page * pages_for(layer.window, n_tokens, n_sequences, page, longest_pass)
        for layer in kv_layers(layers)
    )
    return pages + n_slots(n_sequences) * state_nbytes(layers)


def state_nbytes(layers: Sequence[CacheLayer]) -> int:
    """Return the bytes of a sequence's state, in all layers that have one."""
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
    """Return how many tokens fit into a `KVPool` of `nbytes`, rounded down to whole pages, at most `most`.

    Return 0 if not even one page of tokens fits.
    """
    pages = range(-(-most // page) + 1)
    n = bisect_right(pages, nbytes, key=lambda n: pool_nbytes(layers, n * page, n_sequences, page, longest_pass)) - 1
    return min(max(n, 0) * page, most)


@dataclass(frozen=True)
class CacheSize:
    """The size of keys and values, and of the state, of one sequence of up to `n_tokens` tokens.

    Attributes:
        layers: the cache of each layer.
        page: tokens per page.
        longest_pass: the largest number of new tokens in one pass.
    """

    layers: Sequence[CacheLayer]
    n_tokens: int
    page: int = PAGE
    longest_pass: int = LONGEST_PASS

    @property
    def whole(self) -> int:
        """Bytes if every layer kept every token, without unused slots in pages."""
        return sum(layer.token_nbytes * self.n_tokens for layer in kv_layers(self.layers)) + self.state

    @property
    def state(self) -> int:
        """Bytes of the state, which does not grow."""
        return state_nbytes(self.layers)

    @property
    def held(self) -> int:
        """Bytes of the pages of a pool for one such sequence; layers with a window have fewer pages."""
        return pool_nbytes(self.layers, self.n_tokens, 1, self.page, self.longest_pass)

    @property
    def saved(self) -> int:
        """Bytes that windows save."""
        without = [replace(layer, window=None) if isinstance(layer, KVLayer) else layer for layer in self.layers]
        return pool_nbytes(without, self.n_tokens, 1, self.page, self.longest_pass) - self.held

    @property
    def n_windows(self) -> int:
        """Number of layers with a window."""
        return sum(layer.window is not None for layer in kv_layers(self.layers))
