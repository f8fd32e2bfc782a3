"""`simd` in plain NumPy: one thread, BLAS for every product, and every weight expanded when it is loaded.

This is the rung that `--no-jit` shows, what runs where Numba cannot, and the slow twin of `compiled.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from mlx_engine.backends import sampling as definition
from mlx_engine.backends.base import Backend
from mlx_engine.backends.blas import one_blas_thread
from mlx_engine.backends.parameters import Array, Linear, Rope, Visible
from mlx_engine.backends.sampling import Sampling
from mlx_engine.quant.weight import Weight


class SimdBackend(Backend):
    """NumPy on one thread. A store is one array (2, K, slots, E): keys, then values, contiguous per head."""

    name = "simd"
    kv_step = None

    def __init__(self) -> None:
        # The first search for BLAS libraries takes a tenth of a second or two; no pass shall pay for it.
        with one_blas_thread():
            pass

    @contextmanager
    def session(self) -> Iterator[None]:
        """BLAS held to one thread, and given back afterwards."""
        with one_blas_thread():
            yield

    def prepare(self, weight: Weight) -> Array:
        """Expanded, once."""
        return weight.dequantize()

    def array(self, values: np.ndarray) -> Array:
        """float32."""
        return np.asarray(values, dtype=np.float32)

    def host(self, x: Array) -> np.ndarray:
        """Already there."""
        return np.asarray(x)

    def embed(self, table: Array, ids: Sequence[int]) -> Array:
        """Rows of the table."""
        return table[np.asarray(ids, dtype=np.int64)]

    def linear(self, x: Array, linear: Linear) -> Array:
        """One BLAS call."""
        y = x @ linear.weight.T
        return y if linear.bias is None else y + linear.bias

    def rms_norm(self, x: Array, gain: Array, eps: float) -> Array:
        """The mean is float32, summed pairwise."""
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return gain * (x / np.sqrt(mean + np.float32(eps)))

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float) -> Array:
        """Two passes: the mean first."""
        centered = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(np.square(centered), axis=-1, keepdims=True)
        return gain * (centered / np.sqrt(variance + np.float32(eps))) + bias

    def rope(self, x: Array, rope: Rope, offset: int) -> Array:
        """Both halves of every head at once."""
        cos, sin = rope_table(rope, offset, len(x))
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def attention(self, q: Array, seen: Visible, scale: float) -> Array:
        """The queries of one key/value head are stacked, so that keys and values are never repeated."""
        T, H, E = q.shape
        keys, values = seen.store[:, :, seen.start : seen.stop]
        K, S, _ = keys.shape
        stacked = (q * np.float32(scale)).reshape(T, K, H // K, E).transpose(1, 2, 0, 3).reshape(K, -1, E)
        scores = (stacked @ keys.transpose(0, 2, 1)).reshape(K, H // K, T, S)
        hidden = hidden_keys(T, S, seen.window)
        if hidden is not None:
            scores[..., hidden] = -np.inf
        weights = softmax(scores).reshape(K, -1, S)
        return (weights @ values).reshape(K, H // K, T, E).transpose(2, 0, 1, 3).reshape(T, H, E)

    def silu(self, x: Array) -> Array:
        """For a very negative x the exponential overflows to infinity, and x / infinity is the right answer: 0."""
        with np.errstate(over="ignore"):
            return x / (np.float32(1) + np.exp(-x))

    def gelu(self, x: Array) -> Array:
        """The tanh form; a cube that overflows leaves tanh at 1."""
        with np.errstate(over="ignore"):
            inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
        return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))

    def add(self, a: Array, b: Array) -> Array:
        """Sum."""
        return a + b

    def multiply(self, a: Array, b: Array) -> Array:
        """Product."""
        return a * b

    def scale(self, x: Array, factor: float) -> Array:
        """Product."""
        return x * np.float32(factor)

    def heads(self, x: Array, head_dim: int) -> Array:
        """A view."""
        return x.reshape(len(x), -1, head_dim)

    def merge(self, x: Array) -> Array:
        """A view where memory allows."""
        return x.reshape(len(x), -1)

    def last(self, x: Array) -> Array:
        """A view."""
        return x[-1:]

    def argmax(self, logits: Array) -> Array:
        """NumPy takes the first of equal ones."""
        return int(np.argmax(logits))

    def sample(self, logits: Array, sampling: Sampling, recent: Sequence[int], u: float) -> Array:
        """As `sampling.py` says, which is written in NumPy."""
        row = definition.penalize(logits[0], recent, sampling.repetition_penalty)
        if sampling.is_greedy:
            return int(np.argmax(row))
        return definition.draw(definition.probabilities(row, sampling), u)

    def kv_empty(self, n_kv_heads: int, head_dim: int, capacity: int) -> Array:
        """Memory that the system need not touch until a slot is written."""
        return np.empty((2, n_kv_heads, capacity, head_dim), dtype=np.float32)

    def kv_grow(self, store: Array, capacity: int) -> Array:
        """One copy of the old slots."""
        _, K, slots, E = store.shape
        grown = self.kv_empty(K, E, capacity)
        grown[:, :, :slots] = store
        return grown

    def kv_write(self, store: Array, at: int, k: Array, v: Array) -> Array:
        """In place."""
        store[0, :, at : at + len(k)] = k.transpose(1, 0, 2)
        store[1, :, at : at + len(v)] = v.transpose(1, 0, 2)
        return store

    def kv_slide(self, store: Array, first: int, n: int) -> Array:
        """In place; NumPy minds that the slots may overlap."""
        store[:, :, :n] = store[:, :, first : first + n]
        return store

    def kv_nbytes(self, store: Array) -> int:
        """All slots, filled or not."""
        return int(store.nbytes)


@lru_cache(maxsize=8)
def rope_table(rope: Rope, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (T, 1, E/2) for positions offset .. offset + length - 1; every layer of a pass asks again.

    The angles are float64: at position 40,000 a float32 angle is already wrong in its third decimal.
    """
    positions = np.arange(offset, offset + length, dtype=np.float64)
    angles = np.outer(positions, np.asarray(rope.frequencies))[:, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def hidden_keys(n_queries: int, n_keys: int, window: int | None) -> np.ndarray | None:
    """(T, S) bool, True where query t must not look; None where every query sees every key."""
    if n_queries == 1 and (window is None or n_keys <= window):
        return None
    position = np.arange(n_keys - n_queries, n_keys)[:, None]
    key = np.arange(n_keys)[None, :]
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; the maximum is subtracted first, so no score is too large."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
