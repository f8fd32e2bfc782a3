"""The backends `simd` and `parallel` in NumPy. Matrices are dequantised on load, and BLAS multiplies them.

These classes are used with `--no-jit` and on machines without compiled kernels, and are the reference in tests of
`backends/cpu/backend.py`. `parallel` runs products in chunks on a thread pool, with one BLAS thread per chunk. The
chunks depend only on shapes, so results are bit-identical for any number of threads.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mlx_engine.backends import sampling as definition
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVView, StateView, in_order
from mlx_engine.backends.experts import ExpertLinear, Routing
from mlx_engine.backends.numpy.scalar import TINY
from mlx_engine.backends.parameters import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Convolution,
    DeltaRule,
    Linear,
    Native,
    Rope,
    Scores,
    StateSpace,
)
from mlx_engine.backends.sampling import Draw
from mlx_engine.machine.forks import kept_over_forks
from mlx_engine.quant import key_values
from mlx_engine.quant.weight import Weight

_ERFC = np.vectorize(math.erfc, otypes=[np.float64])

# If a mask allows fewer tokens than this, `_largest_allowed` only searches their logits. With a vocabulary of 152,000
# tokens, this is up to 4 times as fast as searching all logits.
FEW = 4096

# The limit of BLAS to one thread applies to the whole process. `_held` counts the open `one_blas_thread` contexts, and
# `_limit` is the object that restores the previous limit.
_lock = kept_over_forks(threading.Lock())
_held = 0
_limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread. The previous limit is restored when no nested or concurrent context is left."""
    global _held, _limit
    with _lock:
        if _held == 0:
            _limit = _libraries().limit(limits=1)
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if _held == 0:
                _limit.restore_original_limits()


@cache
def _libraries() -> ThreadpoolController:
    """Return the BLAS libraries of this process. The result is cached: the first search takes 0.1 to 0.2 s."""
    return ThreadpoolController()


class SimdBackend(Backend):
    """NumPy on one thread.

    A KV store is one array (n_arrays, G, slots, row). The first axis has the keys, then the values; if `n_arrays`
    is 1, the keys are also the values. The slots of a head are contiguous. A row is the key or value of one
    head and token; `quant/key_values.py` defines its elements.
    """

    name = "simd"

    def __init__(self) -> None:
        super().__init__()
        # Find the BLAS libraries (`_libraries`) here, and not in the first pass.
        with one_blas_thread():
            pass

    @contextmanager
    def session(self) -> Iterator[None]:
        with super().session(), one_blas_thread():
            yield

    def prepare(self, weight: Weight) -> Native:
        return weight.dequantize()

    def array(self, values: np.ndarray) -> Native:
        return np.asarray(values, dtype=np.float32)

    def host(self, x: Native) -> np.ndarray:
        return np.asarray(x)

    def embed(self, table: Native, ids: Sequence[Any]) -> Native:
        return table.rows(ids) if isinstance(table, Weight) else table[np.asarray(ids, dtype=np.int64)]

    def linear(self, x: Native, linear: Linear) -> Native:
        y = x @ linear.weight.T
        return y if linear.bias is None else y + linear.bias

    def rms_norm(self, x: Native, weight: Native, eps: float) -> Native:
        """Compute the mean in float32. NumPy sums pairwise, which keeps the error small."""
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return weight * (x / np.sqrt(mean + np.float32(eps)))

    def group_norm(self, x: Native, weight: Native, eps: float, n_groups: int) -> Native:
        normed = self.rms_norm(x.reshape(len(x), n_groups, -1), np.float32(1), eps)
        return normed.reshape(x.shape) * weight

    def layer_norm(self, x: Native, weight: Native, bias: Native, eps: float) -> Native:
        """Compute the variance from `x - mean`; the formula `mean(x**2) - mean**2` would suffer from cancellation."""
        centered = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(np.square(centered), axis=-1, keepdims=True)
        return weight * (centered / np.sqrt(variance + np.float32(eps))) + bias

    def rope(self, x: Native, rope: Rope, positions: Sequence[int]) -> Native:
        cos, sin = rope_table(rope, tuple(positions))
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def attention(self, q: Native, kv: KVView, counts: Sequence[int], scores: Scores) -> Native:
        """Compute attention for one sequence at a time. Pages that are not consecutive are copied into one array."""
        y, ends = np.empty_like(q), np.cumsum(counts)
        for span, end, n in zip(kv.spans, ends, counts, strict=True):
            if n:
                rows, first = slice(end - n, end), kv.first_visible(span, n)
                stored = kv.store[:, :, span.slots(first, span.length, kv.page)]
                expanded = key_values.expanded(stored, self.kv_type)
                y[rows] = self._attend(q[rows], expanded[0], expanded[-1], kv.window, scores)
        return y

    def _attend(self, q: Native, keys: Native, values: Native, window: int | None, of: Scores) -> Native:
        """Return attention (T, H, E) of a sequence's last T tokens over keys and values (G, S, E).

        The query heads of one KV head are stacked, so that keys and values are not repeated.
        """
        T, H, E = q.shape
        G, S, _ = keys.shape
        stacked = (q * np.float32(of.scale)).reshape(T, G, H // G, E).transpose(1, 2, 0, 3).reshape(G, -1, E)
        scores = (stacked @ keys.transpose(0, 2, 1)).reshape(G, H // G, T, S)
        if of.softcap is not None:
            scores = self.soft_cap(scores, of.softcap)
        hidden = hidden_keys(T, S, window)
        if hidden is not None:
            scores[..., hidden] = -np.inf
        sinks = None if of.sinks is None else of.sinks.reshape(G, H // G, 1, 1)
        weights = softmax(scores, sinks).reshape(G, -1, S)
        return (weights @ values).reshape(G, H // G, T, E).transpose(2, 0, 1, 3).reshape(T, H, E)

    def silu(self, x: Native) -> Native:
        """Ignore overflow: if x is very negative, the exponential is infinite, and the result 0, as it should be."""
        with np.errstate(over="ignore"):
            return x / (np.float32(1) + np.exp(-x))

    def gelu(self, x: Native) -> Native:
        """Ignore overflow: if the cube is infinite, tanh is still 1 or -1, as it should be."""
        with np.errstate(over="ignore"):
            inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
        return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))

    def gelu_erf(self, x: Native) -> Native:
        """Use `math.erfc`, which computes in float64, because NumPy has no error function."""
        return x * (0.5 * _ERFC(x * -math.sqrt(0.5))).astype(np.float32)

    def relu2(self, x: Native) -> Native:
        return np.square(np.maximum(x, np.float32(0)))

    def clamped_swiglu(self, gate: Native, up: Native) -> Native:
        alpha, limit = np.float32(SWIGLU_ALPHA), np.float32(SWIGLU_LIMIT)
        g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
        with np.errstate(over="ignore"):
            return (u + np.float32(1)) * g / (np.float32(1) + np.exp(-alpha * g))

    def add(self, a: Native, b: Native) -> Native:
        return a + b

    def multiply(self, a: Native, b: Native) -> Native:
        return a * b

    def scale(self, x: Native, factor: float) -> Native:
        return x * np.float32(factor)

    def soft_cap(self, x: Native, cap: float) -> Native:
        return np.tanh(x * np.float32(1 / cap)) * np.float32(cap)

    def heads(self, x: Native, head_dim: int) -> Native:
        return x.reshape(len(x), -1, head_dim)

    def merge(self, x: Native) -> Native:
        return x.reshape(len(x), -1)

    def columns(self, x: Native, first: int, last: int) -> Native:
        return np.ascontiguousarray(x[:, first:last])

    def concat(self, a: Native, b: Native) -> Native:
        return np.concatenate((a, b), axis=1)

    def take(self, x: Native, rows: Sequence[int]) -> Native:
        """If one row is wanted, return a view: copying 152,000 logits takes 30 us, longer than finding the largest."""
        return x[rows[0] : rows[0] + 1] if len(rows) == 1 else x[list(rows)]

    def route(self, logits: Native, routing: Routing) -> tuple[Native, Native]:
        """Use a stable sort: of experts with equal scores, the first ones are chosen."""
        p = softmax(logits) if routing.scoring == "softmax" else self.sigmoid(logits)
        ranked = logits if routing.ranks_logits else p if routing.bias is None else p + routing.bias
        ranked = ranked if routing.groups is None else _of_groups(ranked, *routing.groups)
        ids = np.sort(np.argsort(-ranked, axis=-1, kind="stable")[:, : routing.n_used], axis=-1)
        weights = np.take_along_axis(p, ids, axis=-1)
        total = weights.sum(axis=-1, keepdims=True) + np.float32(routing.sum_eps)
        weights = weights / total if routing.normalize else weights
        return ids, weights if routing.scales is None else weights * routing.scales[ids]

    def expert_linear(self, x: Native, linear: ExpertLinear, ids: Native) -> Native:
        """For each expert, multiply the rows of all tokens that have chosen this expert."""
        chosen = ids.reshape(-1)
        y, each = np.empty((len(chosen), linear.shape[0]), dtype=np.float32), len(chosen) // len(x)
        for e in np.unique(chosen):
            rows = np.flatnonzero(chosen == e)
            y[rows] = self.linear(x[rows // each], linear.weights[e])
        return y

    def head_linear(self, x: Native, linear: ExpertLinear) -> Native:
        y = np.empty((*x.shape[:2], linear.shape[0]), dtype=np.float32)
        for h, of in enumerate(linear.weights):
            y[:, h] = self.linear(np.ascontiguousarray(x[:, h, : linear.shape[1]]), of)
        return y

    def join_heads(self, a: Native, b: Native) -> Native:
        return np.concatenate((a, b), axis=-1)

    def combine(self, y: Native, weights: Native) -> Native:
        y = y.reshape(*weights.shape, -1)
        total = weights[:, 0, None] * y[:, 0]
        for c in range(1, weights.shape[1]):
            total += weights[:, c, None] * y[:, c]
        return total

    def argmax(self, logits: Native) -> Native:
        return int(np.argmax(logits))

    def sample(self, logits: Native, draw: Draw) -> Native:
        if draw.mask is not None and draw.sampling.is_argmax:
            return _largest_allowed(logits[0], draw.mask)
        row = definition.adjust(logits[0], draw)
        if draw.sampling.is_greedy:
            return int(np.argmax(row))
        return definition.draw(definition.probabilities(row, draw.sampling), draw.u)

    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int, n_arrays: int = 2) -> Native:
        """Leave the memory uninitialised, so that the operating system maps it only when slots are written."""
        row = key_values.row_length(head_dim, self.kv_type)
        return np.empty((n_arrays, n_kv_heads, n_slots, row), dtype=key_values.DTYPES[self.kv_type])

    def kv_write(self, store: Native, slots: np.ndarray, k: Native, v: Native) -> Native:
        where = in_order(slots)
        for of, x in zip(store, (k, v)[: len(store)], strict=True):
            of[:, where] = key_values.stored(x, self.kv_type).transpose(1, 0, 2)
        return store

    def kv_copy(self, store: Native, source: int, target: int, n: int) -> Native:
        store[:, :, target : target + n] = store[:, :, source : source + n]
        return store

    def kv_read(self, store: Native, first: int, n: int) -> np.ndarray:
        return np.asarray(store[:, :, first : first + n])

    def kv_restore(self, store: Native, first: int, values: np.ndarray) -> Native:
        store[:, :, first : first + values.shape[2]] = values
        return store

    def kv_nbytes(self, store: Native) -> int:
        return int(store.nbytes)

    # ---- recurrent states: convolutions, delta rules and state spaces ----
    # A store is one array (slots, ...). The order of every sum is independent of the number of tokens in the pass, so a
    # token's bits do not depend on how its sequence is divided into passes.

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        """Return zeros, whose memory the operating system maps only when a slot is written."""
        return np.zeros((n_slots, *shape), dtype=np.float32)

    def state_read(self, store: Native, slot: int) -> np.ndarray:
        return np.asarray(store[slot])

    def state_restore(self, store: Native, slot: int, values: np.ndarray) -> None:
        store[slot] = values

    def state_nbytes(self, store: Native) -> int:
        return int(store.nbytes)

    def convolve(self, x: Native, conv: Convolution, state: StateView) -> Native:
        y = np.empty_like(x)
        for first, n, source, target in state.runs.tolist():
            rows = np.concatenate((state.store[source], x[first : first + n]))
            out = y[first : first + n]
            np.multiply(rows[:n], conv.weight[0], out=out)
            for w in range(1, len(conv.weight)):
                out += rows[w : w + n] * conv.weight[w]
            if conv.bias is not None:
                out += conv.bias
            state.store[target] = rows[n:]
        return y

    def delta_rule(self, x: Native, beta: Native, step: Native, rule: DeltaRule, state: StateView) -> Native:
        q, k, v = split(x, rule)
        q, k = _unit(q) * np.float32(rule.key_dim**-0.5), _unit(k)
        heads = [rule.key_head(head) for head in range(rule.n_value_heads)]
        decay = np.exp(rule.rate * np.logaddexp(np.float32(0), step + rule.dt_bias))
        strength, y = self.sigmoid(beta), np.empty_like(v)
        for first, n, source, target in state.runs.tolist():
            matrix = state.store[target]
            matrix[:] = state.store[source]
            for t in range(first, first + n):
                key = k[t, heads][:, :, None]
                matrix *= decay[t, :, None, None]
                known = (matrix * key).sum(axis=1)
                matrix += key * (strength[t, :, None] * (v[t] - known))[:, None, :]
                y[t] = (matrix * q[t, heads][:, :, None]).sum(axis=1)
        return y

    def state_space(self, x: Native, step: Native, space: StateSpace, state: StateView) -> Native:
        inputs, b, c = split_space(x, space)
        heads = np.arange(space.n_heads) * space.n_groups // space.n_heads
        time = np.logaddexp(np.float32(0), step + space.dt_bias)
        decay, added = np.exp(space.rate * time), inputs * time[:, :, None]
        y = inputs * space.skip[:, None]
        for first, n, source, target in state.runs.tolist():
            matrix = state.store[target]
            matrix[:] = state.store[source]
            for t in range(first, first + n):
                matrix *= decay[t, :, None, None]
                matrix += b[t, heads][:, :, None] * added[t][:, None, :]
                y[t] += (matrix * c[t, heads][:, :, None]).sum(axis=1)
        return y

    def sigmoid(self, x: Native) -> Native:
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-x))


@lru_cache(maxsize=8)
def rope_table(rope: Rope, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines (T, 1, E/2) for T positions, scaled by `rope.lengths` and `rope.growth`.

    The result is cached, because all layers of a pass need the same one. So `positions` must be hashable: a tuple or a
    range. Angles are float64: at position 40,000 a float32 angle is wrong in the third decimal.
    """
    angles = np.outer(np.asarray(positions, dtype=np.float64), np.asarray(rope.frequencies))[:, None, :]
    lengths = np.asarray(1.0 if rope.lengths is None else rope.lengths)
    if rope.growth is not None:
        lengths = lengths * np.array([rope.growth.at(position) for position in positions])[:, None, None]
    return (np.cos(angles) * lengths).astype(np.float32), (np.sin(angles) * lengths).astype(np.float32)


def hidden_keys(n_queries: int, n_keys: int, window: int | None) -> np.ndarray | None:
    """Return the attention mask (T, S), True for hidden keys; None if no key is hidden."""
    if n_queries == 1 and (window is None or n_keys <= abs(window)):
        return None
    position = np.arange(n_keys - n_queries, n_keys)[:, None]
    key = np.arange(n_keys)[None, :]
    hidden = key > position
    if window is None:
        return hidden
    # A negative window means chunks of -window positions: a token sees no keys before the first position of its chunk.
    return hidden | (key <= position - window if window > 0 else key < position - position % -window)


def softmax(scores: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Return the softmax over the last axis.

    `sinks` (..., 1) has an additional score for each row, which counts in the maximum and the divisor. The result has
    no weight for the sink.
    """
    most = scores.max(axis=-1, keepdims=True)
    most = most if sinks is None else np.maximum(most, sinks)
    weights = np.exp(scores - most)
    divisor = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / (divisor if sinks is None else divisor + np.exp(sinks - most)))


def split(x: Native, rule: DeltaRule) -> tuple[Native, Native, Native]:
    """Split rows into queries (T, G, E), keys (T, G, E) and values (T, H, P), arrays of the same class as x."""
    n, keys = len(x), rule.n_key_heads * rule.key_dim
    q, k = (x[:, at : at + keys].reshape(n, rule.n_key_heads, rule.key_dim) for at in (0, keys))
    return q, k, x[:, 2 * keys :].reshape(n, rule.n_value_heads, rule.value_dim)


def split_space(x: Native, space: StateSpace) -> tuple[Native, Native, Native]:
    """Split rows into inputs (T, H, P), B (T, G, N) and C (T, G, N), arrays of the same class as x."""
    n, inner, width = len(x), space.n_heads * space.head_dim, space.n_groups * space.state_dim
    b, c = (x[:, at : at + width].reshape(n, space.n_groups, -1) for at in (inner, inner + width))
    return x[:, :inner].reshape(n, space.n_heads, -1), b, c


def _largest_allowed(row: Native, mask: np.ndarray) -> int:
    """Return the allowed token with the largest logit in `row` (V,), in most cases without copying the row."""
    if np.count_nonzero(mask) < FEW:
        allowed = np.flatnonzero(mask)
        return int(allowed[np.argmax(row[allowed])])
    top = int(np.argmax(row))
    return top if mask[top] else int(np.argmax(definition.masked(row, mask)))


def _unit(x: Native) -> Native:
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + np.float32(TINY))


def _of_groups(ranked: np.ndarray, n: int, k: int) -> np.ndarray:
    """Return scores (T, X), with minus infinity for experts outside the k best of n groups (`Routing.groups`)."""
    groups = ranked.reshape(len(ranked), n, -1)
    sums = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    kept = np.zeros(sums.shape, dtype=bool)
    np.put_along_axis(kept, np.argsort(-sums, axis=-1, kind="stable")[:, :k], True, axis=1)
    return np.where(kept[..., None], groups, np.float32(-np.inf)).reshape(ranked.shape)


# The smallest number of multiplications per chunk. Submitting a chunk takes about 50 microseconds; in this time, one
# core does a few million multiplications.
WORTHWHILE = 4_000_000
# The largest number of chunks per product. More chunks would balance the threads better, but take longer to submit.
CHUNKS = 16


class ParallelBackend(SimdBackend):
    """NumPy on `threads` threads."""

    name = "parallel"

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self._start()

    def _start(self) -> None:
        self._executor, self._process = ThreadPoolExecutor(self.threads, thread_name_prefix="mlx_engine"), os.getpid()

    def linear(self, x: Native, linear: Linear) -> Native:
        """Multiply in chunks. A chunk is a range of rows of the weight, and computes the same range of columns of y."""
        w = linear.weight
        y = np.empty((len(x), len(w)), dtype=np.float32)

        def multiply(first: int, last: int) -> None:
            np.matmul(x, w[first:last].T, out=y[:, first:last])

        self._run(multiply, len(w), x.size * len(w))
        return y if linear.bias is None else y + linear.bias

    def _attend(self, q: Native, keys: Native, values: Native, window: int | None, of: Scores) -> Native:
        """Compute attention in chunks of KV heads."""
        n_kv_heads, group = len(keys), q.shape[1] // len(keys)
        y = np.empty_like(q)

        def attend(first: int, last: int) -> None:
            heads, attend_to = slice(first * group, last * group), super(ParallelBackend, self)._attend
            own = of if of.sinks is None else replace(of, sinks=of.sinks[heads])
            y[:, heads] = attend_to(q[:, heads], keys[first:last], values[first:last], window, own)

        self._run(attend, n_kv_heads, q.size * keys.shape[1])
        return y

    def _run(self, work: Callable[[int, int], None], n: int, multiplications: int) -> None:
        """Divide [0, n) into ranges, and call `work(first, last)` for each. If there is little work, use one range."""
        n_chunks = min(n, CHUNKS, multiplications // WORTHWHILE)
        if n_chunks < 2:
            return work(0, n)
        if self._process != os.getpid():  # a forked process has none of its parent's threads
            self._start()
        edges = [n * i // n_chunks for i in range(n_chunks + 1)]
        # `list` waits for every chunk, and raises the exception of a chunk that failed.
        list(self._executor.map(work, edges[:-1], edges[1:]))
        return None
