"""`mlx`: stock MLX operations on MLX's default device, which is Metal, CUDA or, for correctness only, the CPU.

Nothing is computed before somebody asks: from embedding to logits, and through the choice of a token, results are
promises. A choice is an array of no dimension, and `embed` takes it as an id, so that the next pass can be built, and
begun, before the id of this one has been seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.backends import mlx_device, mlx_sampling
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVView, in_order
from mlx_engine.backends.mlx_weights import BlockMatrix, reinterpret
from mlx_engine.backends.parameters import Array, Linear, Rope
from mlx_engine.backends.sampling import Sampling
from mlx_engine.backends.simd import hidden_keys, rope_table
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight


class MlxBackend(Backend):
    """Lazy `mx.array`s, float32. A store is one array (2, G, slots, E): keys, then values, contiguous per head.

    All work goes to one stream, which threads may take turns with: a graph that was built in one thread can be
    evaluated in another. MLX's own streams belong to the thread that made them.
    """

    name = "mlx"
    lazy = True

    def __init__(self) -> None:
        mlx_device.keep_weights_resident()
        self.device = mlx_device.description()
        self._stream, self._turn = mx.new_thread_unsafe_stream(mx.default_device()), threading.RLock()
        self._real = mx.float64 if mlx_device.kind() == "cpu" else mx.float32
        self._rotations: dict[Rope, tuple[mx.array, mx.array]] = {}

    @contextmanager
    def session(self) -> Iterator[None]:
        """The stream's turn. What is left unevaluated may be evaluated in any other session."""
        with self._turn, mx.stream(self._stream):
            yield

    def prepare(self, weight: Weight) -> Array:
        """A Q8_0 matrix keeps its numbers, see `mlx_weights.py`; anything else is expanded, once."""
        if weight.type == Q8_0 and len(weight.shape) == 2:
            matrix = reinterpret(weight)
            if matrix is not None:
                return matrix
        return mx.array(weight.dequantize())

    def array(self, values: np.ndarray) -> Array:
        """A copy."""
        return mx.array(np.asarray(values, dtype=np.float32))

    def host(self, x: Array) -> np.ndarray:
        """Waits; memory is shared where the device has no memory of its own."""
        return np.asarray(x)

    def token_id(self, token: Array) -> int:
        """Waits."""
        return int(token.item())

    def begin(self, x: Array) -> None:
        """Hands the graph to the device."""
        mx.async_eval(x)  # type: ignore[no-untyped-call]

    def wait(self, x: Array) -> None:
        """Evaluates the graph."""
        mx.eval(x)

    def embed(self, table: Array, ids: Sequence[Any]) -> Array:
        """Rows of the table, these alone expanded."""
        known = [i for i in ids if not isinstance(i, mx.array)]
        if known and not 0 <= min(known) <= max(known) < table.shape[0]:
            n = table.shape[0]
            raise IndexError(f"expected token ids from 0 to {n - 1:,}, found {min(known):,} to {max(known):,}")
        rows = mlx_sampling.id_array(ids)
        return table[rows] if isinstance(table, mx.array) else table.rows(rows)

    def linear(self, x: Array, linear: Linear) -> Array:
        """`mx.quantized_matmul` for Q8_0, `mx.matmul` for anything else."""
        w: mx.array | BlockMatrix = linear.weight
        y = x @ w.T if isinstance(w, mx.array) else w.multiply(x)
        return y if linear.bias is None else y + linear.bias

    def rms_norm(self, x: Array, gain: Array, eps: float) -> Array:
        """`mx.fast.rms_norm`."""
        return mx.fast.rms_norm(x, gain, eps)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float) -> Array:
        """`mx.fast.layer_norm`."""
        return mx.fast.layer_norm(x, gain, bias, eps)

    def rope(self, x: Array, rope: Rope, positions: Sequence[int]) -> Array:
        """Both halves at once: each times the cosine, plus the other times the sine with its sign.

        `mx.fast.rope` takes its angles in float32, which at position 40,000 are wrong in their third decimal.
        """
        cos, sin = self.rotation(rope, max(positions) + 1)
        here = indices(np.asarray(positions))
        halves = x.reshape(len(x), -1, 2, x.shape[-1] // 2)
        turned = halves * cos[here][:, None, None] + halves[:, :, ::-1] * sin[here][:, None]
        return turned.reshape(x.shape)

    def rotation(self, rope: Rope, length: int) -> tuple[mx.array, mx.array]:
        """Cosines (L, E/2) and signed sines (L, 2, E/2), minus then plus, of the first L >= `length` positions.

        There are twice as many each time that they do not suffice.
        """
        found = self._rotations.get(rope)
        if found is None or len(found[0]) < length:
            cos, sin = rope_table(rope, range(max(512, 1 << (length - 1).bit_length())))
            signed = np.concatenate((-sin, sin), axis=1)
            found = self._rotations[rope] = (mx.array(cos[:, 0]), mx.array(signed))
        return found

    def attention(self, q: Array, kv: KVView, counts: Sequence[int], scale: float) -> Array:
        """`mx.fast.scaled_dot_product_attention`, sequence by sequence; it repeats no KV head.

        Pages that follow each other are read where they lie, others are gathered.
        """
        outs, end = [], 0
        for span, n in zip(kv.spans, counts, strict=True):
            end += n
            if n:
                first = kv.first_visible(span, n)
                slots = indices(span.slots(first, span.length, kv.page))
                keys, values = (kv.store[i, None][:, :, slots] for i in (0, 1))
                mask = _mask(n, span.length - first, kv.window)
                queries = q[end - n : end].transpose(1, 0, 2)[None]
                y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
                outs.append(y.squeeze(0).transpose(1, 0, 2))  # y[0] would be a copy
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def silu(self, x: Array) -> Array:
        """`mx.sigmoid` overflows nowhere."""
        return x * mx.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        """The tanh form; a cube that overflows leaves tanh at 1."""
        return 0.5 * x * (1 + mx.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))

    def add(self, a: Array, b: Array) -> Array:
        """Sum."""
        return a + b

    def multiply(self, a: Array, b: Array) -> Array:
        """Product."""
        return a * b

    def scale(self, x: Array, factor: float) -> Array:
        """Product."""
        return x * factor

    def heads(self, x: Array, head_dim: int) -> Array:
        """A view."""
        return x.reshape(len(x), -1, head_dim)

    def merge(self, x: Array) -> Array:
        """A view for one token."""
        return x.reshape(len(x), -1)

    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """A view where the rows follow each other."""
        return x[indices(np.asarray(rows))]

    def argmax(self, logits: Array) -> Array:
        """MLX takes the first of equal ones."""
        return mx.argmax(logits.squeeze(0))

    def sample(self, logits: Array, sampling: Sampling, recent: Sequence[Any], u: float) -> Array:
        """As `sampling.py` says, on the device."""
        row = mlx_sampling.penalize(logits.squeeze(0), recent, sampling.repetition_penalty)
        return mx.argmax(row) if sampling.is_greedy else mlx_sampling.draw(row, sampling, u, self._real)

    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int) -> Array:
        """Zeros, on the stream of all work: a cache may be made outside of sessions, in any thread."""
        return mx.zeros((2, n_kv_heads, n_slots, head_dim), stream=self._stream)

    def kv_write(self, store: Array, slots: np.ndarray, k: Array, v: Array) -> Array:
        """In place as the caller sees it, and on the device too: nobody else holds the array that is overwritten."""
        where = indices(slots)
        store[0, :, where] = k.transpose(1, 0, 2)
        store[1, :, where] = v.transpose(1, 0, 2)
        return store

    def kv_nbytes(self, store: Array) -> int:
        """All slots, filled or not."""
        return int(store.nbytes)


def indices(numbers: np.ndarray | slice) -> slice | mx.array:
    """Return numbers as MLX takes them for an index: a slice where they follow each other."""
    found = numbers if isinstance(numbers, slice) else in_order(numbers)
    return found if isinstance(found, slice) else mx.array(found.astype(np.int32))


def _mask(n_queries: int, n_keys: int, window: int | None) -> mx.array | str | None:
    """What MLX calls the mask: none for a single query, whose window has been cut out already."""
    if n_queries == 1:
        return None
    if window is None or n_keys <= window:
        return "causal"
    hidden = hidden_keys(n_queries, n_keys, window)
    return None if hidden is None else mx.array(~hidden)
