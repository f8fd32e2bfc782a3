"""The backend `mlx`: stock MLX operations on MLX's default device, which is Metal, CUDA or the CPU.

On the CPU, this backend is meant for tests only. Evaluation is lazy from the embedding to the choice of a token:
operations build a graph, which MLX evaluates when a result is needed. A chosen token is a zero-dimensional array, and
`embed` accepts this array as an id. So the next pass can be built and submitted before the host has the id of the
chosen token.

With float16 or bfloat16 activations, arrays have the same types as in mlx-lm: hidden states, weights, scales, the
results of products and, by default, keys and values have the type of activations. Norms, softmax and rotation compute
in float32 internally. The states of linear attention and all logits are float32.

Sampling is the algorithm of `backends/sampling.py` in lazy operations, so that the host need not wait. Probabilities
are float64 on the CPU. MLX has no float64 on GPUs, so they are float32 there. If the random number is within rounding
error of a token's cumulative probability, a GPU may choose another token than the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVView, StateView, in_order
from mlx_engine.backends.experts import ExpertLinear, Routing
from mlx_engine.backends.mlx import device as mlx_device
from mlx_engine.backends.mlx import experts as mlx_experts
from mlx_engine.backends.mlx.device import DeviceStream
from mlx_engine.backends.mlx.weights import BlockMatrix, affine_matrix, group_matrix, reinterpret
from mlx_engine.backends.numpy.scalar import TINY
from mlx_engine.backends.numpy.simd import hidden_keys, rope_table, split, split_space
from mlx_engine.backends.parameters import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Convolution,
    DeltaRule,
    Linear,
    Native,
    Norm,
    Rope,
    Scores,
    StateSpace,
)
from mlx_engine.backends.sampling import LARGEST, SMALLEST, Draw
from mlx_engine.backends.session_guard import SessionGuard
from mlx_engine.options import Sampling
from mlx_engine.quant import key_values
from mlx_engine.quant.group_weight import in_mlx_order
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


class MlxBackend(Backend):
    """The backend whose arrays are lazy `mx.array`s of the type of activations.

    A KV store is one array (n_arrays, G, slots, row): the keys, and the values unless `n_arrays` is 1. The slots of a
    head are contiguous. A row is the key or value of one head and token: E elements of the type `kv_type`, or for
    "q8_0" the bytes of its blocks.

    All work runs on one stream of this backend, which several threads may use, one at a time. So a graph that one
    thread has built can be evaluated in any thread. A graph on one of MLX's default streams can be evaluated only in
    the thread that created this stream.
    """

    lazy = True
    holds_some_experts = True
    # The number of tokens that `state_space` processes together.
    space_tokens = 64

    def __init__(self, activations: str = "f32", name: str = "mlx") -> None:
        self.name = name
        super().__init__()
        self.activations, self._dtype = activations, DTYPES[activations]
        self.kv_type = activations
        mlx_device.keep_weights_resident()
        self.device = mlx_device.description()
        self.guard = SessionGuard(self.name, survives_fork=False)
        self._use(mx.default_device())
        self._real = mx.float64 if mlx_device.kind() == "cpu" else mx.float32
        self._rotations: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._exchanged: mx.array | None = None

    def _use(self, device: mx.Device) -> None:
        self._lent = DeviceStream(device, self.guard)
        self._stream = self._lent.stream

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.guard.held(), mx.stream(self._stream):
            yield

    def close(self) -> None:
        with self.guard.close():
            self._lent.close()

    def prepare(self, weight: Weight) -> Native:
        """Keep matrices of MLX's types quantised; repack Q8_0 and MXFP4 with the same values; dequantise all others.

        With float16 or bfloat16 activations, also repack Q4_0 and Q4_K. Scales, biases and all dequantised weights are
        then rounded to the type of activations. A Q8_0, Q4_0 or Q4_K matrix with a scale or bias that is not finite in
        this type is dequantised.
        """
        weight = in_mlx_order(weight)
        if len(weight.shape) == 2:
            if isinstance(weight.type, GroupType):
                return group_matrix(weight, weight.type, self._dtype)
            matrix = reinterpret(weight, self._dtype) if weight.type == Q8_0 else None
            if self._dtype != mx.float32 and weight.type != Q8_0:
                matrix = affine_matrix(weight, self._dtype)
            if matrix is not None:
                return matrix
        return mx.array(weight.dequantize(), dtype=self._dtype)

    def array(self, values: np.ndarray) -> Native:
        return mx.array(np.asarray(values, dtype=np.float32))

    def as_activations(self, values: np.ndarray) -> Native:
        return self.array(values).astype(self._dtype)

    def host(self, x: Native) -> np.ndarray:
        """Wait for x, and return it as a NumPy array; float32 is not copied if the device shares the host's memory.

        Take the guard's lock, because threads that read log-probabilities call this method outside of sessions. At
        exit, `SessionGuard.hold_for_ever` keeps the lock, so that these threads no longer use MLX.
        """
        with self.guard.held():
            return np.asarray(x if self._dtype == mx.float32 else _widened(x))

    def row_sums(self, logits: Native) -> Native:
        return logits.sum(axis=-1)

    def token_id(self, token: Native) -> int:
        return int(token.item())

    def begin(self, x: Native) -> None:
        mx.async_eval(x)  # type: ignore[no-untyped-call]

    def wait(self, x: Native) -> None:
        mx.eval(x)

    def all_sum(self, x: Native) -> Native:
        """Sum over ranks lazily, on the device: add in float32, then round once to the type of x."""
        if self.group is None:
            return x
        self._exchanged = self.group.sum(self._in_order(x.astype(mx.float32))).astype(x.dtype)
        return self._exchanged

    def all_columns(self, x: Native, n: int) -> Native:
        if self.group is None:
            return x
        padded = mx.pad(x, [(0, 0), (0, -(-n // self.group.size) - x.shape[1])])
        self._exchanged = self.group.gather(self._in_order(padded)).transpose(1, 0, 2).reshape(len(x), -1)[:, :n]
        return self._exchanged

    def _in_order(self, x: mx.array) -> mx.array:
        """Return x, dependent on the previous sum or gather over ranks: all ranks must run these in the same order."""
        return x if self._exchanged is None else mx.depends([x], [self._exchanged])[0]

    def embed(self, table: Native, ids: Sequence[Any]) -> Native:
        """Dequantise only the rows `ids`. A `Weight` table is read on the host, after waiting for the ids."""
        if isinstance(table, Weight):
            return self.as_activations(table.rows([self.token_id(i) if isinstance(i, mx.array) else i for i in ids]))
        known = [i for i in ids if not isinstance(i, mx.array)]
        if known and not 0 <= min(known) <= max(known) < table.shape[0]:
            n = table.shape[0]
            raise IndexError(f"token ids must be from 0 to {n - 1:,}, not from {min(known):,} to {max(known):,}")
        rows = id_array(ids)
        return table[rows] if isinstance(table, mx.array) else table.rows(rows).astype(self._dtype)

    def linear(self, x: Native, linear: Linear) -> Native:
        w: mx.array | BlockMatrix = linear.weight
        y = x @ w.T if isinstance(w, mx.array) else w.multiply(x)
        return y if linear.bias is None else y + linear.bias

    def rms_norm(self, x: Native, weight: Native, eps: float) -> Native:
        return mx.fast.rms_norm(x, weight, eps)

    def group_norm(self, x: Native, weight: Native, eps: float, n_groups: int) -> Native:
        return mx.fast.rms_norm(x.reshape(len(x), n_groups, -1), None, eps).reshape(x.shape) * weight

    def layer_norm(self, x: Native, weight: Native, bias: Native, eps: float) -> Native:
        return mx.fast.layer_norm(x, weight, bias, eps)

    def rope(self, x: Native, rope: Rope, positions: Sequence[int]) -> Native:
        """Rotate without `mx.fast.rope`: its float32 angles are wrong in the third decimal at position 40,000."""
        cos, sin = self.rotation(rope, max(positions) + 1)
        here = indices(np.asarray(positions))
        halves = x.reshape(len(x), -1, 2, x.shape[-1] // 2)
        turned = halves * cos[here][:, None, None] + halves[:, :, ::-1] * sin[here][:, None]
        return turned.reshape(x.shape).astype(x.dtype)

    def rotation(self, rope: Rope, length: int) -> tuple[mx.array, mx.array]:
        """Return cosines (L, E/2) and sines (L, 2, E/2) for positions 0 to L - 1, where L is at least `length`.

        The sines of a position are stored twice: negated for the first half of a head, unchanged for the second half.
        The arrays of each `rope` are cached.
        """
        found = self._rotations.get(rope)
        if found is None or len(found[0]) < length:
            cos, sin = rope_table(rope, range(max(512, 1 << (length - 1).bit_length())))
            signed = np.concatenate((-sin, sin), axis=1)
            found = self._rotations[rope] = (mx.array(cos[:, 0]), mx.array(signed))
        return found

    def attention(self, q: Native, kv: KVView, counts: Sequence[int], scores: Scores) -> Native:
        """Call MLX's `scaled_dot_product_attention` per sequence or, if scores have a soft cap, `_capped_attention`.

        Adjacent pages are read in place; other pages are copied. Keys and values of another type than the activations
        are copied and converted.
        """
        outs, end = [], 0
        for span, n in zip(kv.spans, counts, strict=True):
            end += n
            if n:
                first = kv.first_visible(span, n)
                slots = indices(span.slots(first, span.length, kv.page))
                keys, values = (expanded_rows(kv.store[i, None][:, :, slots], q.dtype) for i in (0, -1))
                sinks = None if scores.sinks is None else scores.sinks.astype(q.dtype)
                mask = _mask(n, span.length - first, kv.window)
                queries = q[end - n : end].transpose(1, 0, 2)[None]
                if scores.softcap is None:
                    y = mx.fast.scaled_dot_product_attention(
                        queries, keys, values, scale=scores.scale, mask=mask, sinks=sinks
                    )
                else:
                    y = _capped_attention(queries, keys, values, scores, scores.softcap, kv.window)
                outs.append(y.squeeze(0).transpose(1, 0, 2))  # `y[0]` would copy the array
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def silu(self, x: Native) -> Native:
        return x * mx.sigmoid(x)

    def gelu(self, x: Native) -> Native:
        """Ignore overflow: if the cube is infinite, tanh is still 1 or -1, as it should be."""
        return 0.5 * x * (1 + mx.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))

    def gelu_erf(self, x: Native) -> Native:
        return 0.5 * x * (1 + mx.erf(x * 0.5**0.5))

    def relu2(self, x: Native) -> Native:
        return mx.square(mx.maximum(x, 0))

    def clamped_swiglu(self, gate: Native, up: Native) -> Native:
        g, u = mx.minimum(gate, SWIGLU_LIMIT), mx.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (u + 1) * g * mx.sigmoid(SWIGLU_ALPHA * g)

    def add(self, a: Native, b: Native) -> Native:
        return a + b

    def multiply(self, a: Native, b: Native) -> Native:
        return a * b

    def scale(self, x: Native, factor: float) -> Native:
        """Multiply in float32: MLX would round the factor to the type of x."""
        return (x.astype(mx.float32) * factor).astype(x.dtype)

    def soft_cap(self, x: Native, cap: float) -> Native:
        return cap * mx.tanh(x / cap)

    def heads(self, x: Native, head_dim: int) -> Native:
        return x.reshape(len(x), -1, head_dim)

    def merge(self, x: Native) -> Native:
        return x.reshape(len(x), -1)

    def columns(self, x: Native, first: int, last: int) -> Native:
        return x[:, first:last]

    def concat(self, a: Native, b: Native) -> Native:
        return mx.concatenate([a, b], axis=1)

    def take(self, x: Native, rows: Sequence[int]) -> Native:
        return x[indices(np.asarray(rows))]

    def stack(self, linears: Sequence[Linear]) -> Native:
        return mlx_experts.stacked(linears, self._dtype)

    def stack_some(self, read: Callable[[int], Linear], n: int, n_slots: int) -> Native:
        return mlx_experts.Slots(lambda e: self.stack([read(e)]), n, n_slots)

    def route(self, logits: Native, routing: Routing) -> tuple[Native, Native]:
        return mlx_experts.route(logits, routing)

    def expert_linear(self, x: Native, linear: ExpertLinear, ids: Native) -> Native:
        return mlx_experts.multiply(x, linear.weights, ids, row_by_row=False)

    def head_linear(self, x: Native, linear: ExpertLinear) -> Native:
        n_tokens, n_heads, _ = x.shape
        ids = mx.broadcast_to(mx.arange(n_heads), (n_tokens, n_heads))
        y: Any = self.expert_linear(x[..., : linear.shape[1]].reshape(-1, linear.shape[1]), linear, ids)
        return y.reshape(n_tokens, n_heads, linear.shape[0])

    def join_heads(self, a: Native, b: Native) -> Native:
        return mx.concatenate([a, b], axis=-1)

    def combine(self, y: Native, weights: Native) -> Native:
        return mlx_experts.combine(y, weights)

    def norm_head(self, x: Native, norm: Norm, head: Linear) -> Native:
        logits: Any = super().norm_head(x, norm, head)
        return logits.astype(mx.float32)

    def argmax(self, logits: Native) -> Native:
        """`mx.argmax` returns the first of equal values, as required."""
        return mx.argmax(logits.squeeze(0))

    def sample(self, logits: Native, draw: Draw) -> Native:
        row = adjust(logits.squeeze(0), draw)
        return mx.argmax(row) if draw.sampling.is_greedy else drawn(row, draw.sampling, draw.u, self._real)

    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int, n_arrays: int = 2) -> Native:
        """Allocate on this backend's stream, because a cache may be created outside of sessions, in any thread."""
        # Check first: in a forked process, MLX may wait forever for a lock that a thread of the parent held.
        self.guard.check()
        row = key_values.row_length(head_dim, self.kv_type)
        dtype = DTYPES.get(self.kv_type, mx.uint8)
        return mx.zeros((n_arrays, n_kv_heads, n_slots, row), dtype=dtype, stream=self._stream)

    def kv_write(self, store: Native, slots: np.ndarray, k: Native, v: Native) -> Native:
        """Write in place: MLX does not copy the store, because no other array uses its memory."""
        where = indices(slots)
        store[0, :, where] = stored_rows(k.transpose(1, 0, 2), self.kv_type)
        if len(store) == 2:
            store[1, :, where] = stored_rows(v.transpose(1, 0, 2), self.kv_type)
        return store

    def kv_copy(self, store: Native, source: int, target: int, n: int) -> Native:
        """Wait for the read of the slots before the write: MLX would copy the whole store if a read were pending."""
        with self.session():
            copied = mx.contiguous(store[:, :, source : source + n])
            mx.eval(copied)
            store[:, :, target : target + n] = copied
        return store

    def kv_read(self, store: Native, first: int, n: int) -> np.ndarray:
        """Wait for the slots, and return a copy. NumPy has no bfloat16, so bfloat16 is returned as uint16."""
        with self.session():
            copied = mx.contiguous(store[:, :, first : first + n])
            copied = copied.view(mx.uint16) if copied.dtype == mx.bfloat16 else copied
            mx.eval(copied)
            return np.array(copied)

    def kv_restore(self, store: Native, first: int, values: np.ndarray) -> Native:
        with self.session():
            given = mx.array(values)
            given = given.view(mx.bfloat16) if store.dtype == mx.bfloat16 else given
            store[:, :, first : first + values.shape[2]] = given
            mx.eval(store)
        return store

    def kv_nbytes(self, store: Native) -> int:
        return int(store.nbytes)

    # ---- recurrent states: convolutions, delta rules and state spaces ----
    # A store is a list of arrays, one per slot. A slot is written by replacing its array, so nothing is copied. States
    # are float32 for all types of activations, because rounding errors would accumulate with every token.

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        self.guard.check()  # as in `kv_empty`
        return [mx.zeros(shape, stream=self._stream)] * n_slots

    def state_read(self, store: Native, slot: int) -> np.ndarray:
        with self.session():
            mx.eval(store[slot])
            return np.array(store[slot])

    def state_restore(self, store: Native, slot: int, values: np.ndarray) -> None:
        with self.session():
            store[slot] = mx.array(values)

    def state_nbytes(self, store: Native) -> int:
        return sum(int(array.nbytes) for array in store)

    def convolve(self, x: Native, conv: Convolution, state: StateView) -> Native:
        outs = []
        for first, n, source, target in state.runs.tolist():
            rows = mx.concatenate([state.store[source], x[first : first + n]])
            y = rows[:n] * conv.weight[0]
            for w in range(1, len(conv.weight)):
                y = y + rows[w : w + n] * conv.weight[w]
            y = y if conv.bias is None else y + conv.bias
            outs.append(y)
            # Copied, because a view would keep the inputs of the whole pass in memory.
            state.store[target] = mx.contiguous(rows[n:])
        return (outs[0] if len(outs) == 1 else mx.concatenate(outs)).astype(x.dtype)

    def delta_rule(self, x: Native, beta: Native, step: Native, rule: DeltaRule, state: StateView) -> Native:
        q, k, v = split(x.astype(mx.float32), rule)
        beta, step = beta.astype(mx.float32), step.astype(mx.float32)
        heads = mx.array([rule.key_head(head) for head in range(rule.n_value_heads)])
        q, k = (mx.take(_unit(of), heads, axis=1) for of in (q, k))
        q = q * rule.key_dim**-0.5
        decay = mx.exp(rule.rate * mx.logaddexp(step + rule.dt_bias, mx.array(0.0)))
        strength, outs = mx.sigmoid(beta), []
        for first, n, source, target in state.runs.tolist():
            matrix = state.store[source]
            for t in range(first, first + n):
                matrix, key = matrix * decay[t, :, None, None], k[t][:, :, None]
                known = (matrix * key).sum(axis=1)
                matrix = matrix + key * (strength[t, :, None] * (v[t] - known))[:, None, :]
                outs.append((matrix * q[t][:, :, None]).sum(axis=1))
            state.store[target] = matrix
        return mx.stack(outs).astype(x.dtype)

    def state_space(self, x: Native, step: Native, space: StateSpace, state: StateView) -> Native:
        """Multiply matrices, for `space_tokens` tokens at a time: section 6 of the paper that `StateSpace` cites."""
        inputs, b, c = split_space(x.astype(mx.float32), space)
        time = mx.logaddexp(step.astype(mx.float32) + space.dt_bias, mx.array(0.0))
        repeated, outs = space.n_heads // space.n_groups, []
        b, c = (mx.repeat(of, repeated, axis=1).swapaxes(0, 1) for of in (b, c))  # (H, T, N)
        added, rates = (inputs * time[:, :, None]).swapaxes(0, 1), (space.rate * time).T
        for first, n, source, target in state.runs.tolist():
            matrix = state.store[source]
            for at in range(first, first + n, self.space_tokens):
                rows = slice(at, min(at + self.space_tokens, first + n))
                y, matrix = _space_chunk(matrix, added[:, rows], b[:, rows], c[:, rows], rates[:, rows])
                outs.append(y)
            state.store[target] = matrix
        y = (outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)).swapaxes(0, 1)
        return (y + inputs * space.skip[:, None]).astype(x.dtype)

    def sigmoid(self, x: Native) -> Native:
        return mx.sigmoid(x)


def indices(numbers: np.ndarray | slice) -> slice | mx.array:
    """Return row numbers as an index for MLX: a slice if they are consecutive, else an int32 array."""
    found = numbers if isinstance(numbers, slice) else in_order(numbers)
    return found if isinstance(found, slice) else mx.array(found.astype(np.int32))


def stored_rows(x: Native, type_: str) -> Native:
    """Round rows (..., E) of keys or values to a type, as `quant.key_values.stored` does; Q8_0 is returned as bytes."""
    if type_ != "q8_0":
        return x.astype(DTYPES[type_])
    blocks = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 32)
    scale = mx.max(mx.abs(blocks), axis=-1, keepdims=True) / 127
    products = blocks * mx.where(scale == 0, 0, 1 / scale)
    # Round to the nearest integer, halves away from zero, by adding to the magnitude and truncating. Add the largest
    # float32 below 0.5: with 0.5, the largest product below 0.5 would become 1.
    away = mx.where(products < 0, -0.49999997, 0.49999997)
    quants = mx.where(mx.isfinite(products), products + away, 0).astype(mx.int8)
    rows = mx.concatenate([scale.astype(mx.float16).view(mx.uint8), quants.view(mx.uint8)], axis=-1)
    return rows.reshape(*x.shape[:-1], -1)


def expanded_rows(rows: Native, dtype: mx.Dtype) -> Native:
    """Return stored rows of keys or values as (..., E) numbers of the given type."""
    if rows.dtype != mx.uint8:
        return rows.astype(dtype)
    blocks = rows.reshape(*rows.shape[:-1], -1, 34)
    scale = mx.contiguous(blocks[..., :2]).view(mx.float16).astype(mx.float32)
    values = scale * mx.contiguous(blocks[..., 2:]).view(mx.int8).astype(mx.float32)
    return values.reshape(*rows.shape[:-1], -1).astype(dtype)


def _capped_attention(
    q: mx.array, keys: mx.array, values: mx.array, of: Scores, cap: float, window: int | None
) -> mx.array:
    """Return attention (1, H, T, E) with a soft cap, from q (1, H, T, E) and keys and values (1, G, S, E)."""
    (_, H, T, E), (_, G, S, _) = q.shape, keys.shape
    q = (q.astype(mx.float32) * (of.scale / cap)).astype(q.dtype).reshape(G, H // G * T, E)
    scores = (cap * mx.tanh((q @ keys[0].swapaxes(1, 2)).astype(mx.float32))).reshape(H, T, S)
    hidden = hidden_keys(T, S, window)
    if hidden is not None:
        scores = mx.where(mx.array(hidden), -mx.inf, scores)
    if of.sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(of.sinks[:, None, None], (H, T, 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[:, :, :S].astype(q.dtype)
    return (weights.reshape(G, H // G * T, S) @ values[0]).reshape(1, H, T, E)


def _mask(n_queries: int, n_keys: int, window: int | None) -> mx.array | str | None:
    """Return the attention mask: "causal", an array with True for visible keys, or None for a single query.

    A single query needs no mask, because the caller passes only the keys in its window.
    """
    if n_queries == 1:
        return None
    if window is None or n_keys <= abs(window):
        return "causal"
    hidden = hidden_keys(n_queries, n_keys, window)
    return None if hidden is None else mx.array(~hidden)


def _widened(x: Native) -> Native:
    """Convert a float array, or each float array in a tuple or list, to float32, because NumPy has no bfloat16."""
    if isinstance(x, tuple | list):
        return [_widened(part) for part in x]
    return x.astype(mx.float32) if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) else x


def _space_chunk(matrix: Native, x: Native, b: Native, c: Native, rates: Native) -> tuple[Native, Native]:
    """Return the outputs (H, L, P) of a state space for L tokens, and the state (H, N, P) after these tokens.

    `matrix` (H, N, P) is the state before the tokens, x (H, L, P) the inputs times the time steps, and `rates` (H, L)
    the logarithms of the decays; b and c are (H, L, N). The decay from token s to token l is the exponential of the sum
    of `rates` of tokens s + 1 to l. Each sum is computed separately: differences of cumulative sums would lose digits.
    """
    n = rates.shape[1]
    if n == 1:
        matrix = mx.exp(rates)[:, :, None] * matrix + b.swapaxes(1, 2) * x
        return c @ matrix, matrix
    token = mx.arange(n)
    # Entry (l, s) is the sum of `rates` of tokens s + 1 to l.
    sums = mx.cumsum(mx.where(token[:, None] > token[None, :], rates[:, :, None], 0.0), axis=1)
    decays = mx.where(token[:, None] >= token[None, :], mx.exp(sums), 0.0)
    before = mx.exp(mx.cumsum(rates, axis=1))[:, :, None]
    y = (decays * (c @ b.swapaxes(1, 2))) @ x + before * (c @ matrix)
    return y, before[:, -1:] * matrix + (b * decays[:, -1, :, None]).swapaxes(1, 2) @ x


def _unit(x: Native) -> Native:
    return x / mx.sqrt((x * x).sum(axis=-1, keepdims=True) + TINY)


# The smallest temperature by which logits are divided: a GPU would round smaller temperatures to 0.
COLDEST = float(np.finfo(np.float32).tiny)


def id_array(ids: Sequence[Any]) -> mx.array:
    """Return T > 0 ids, each an int or a zero-dimensional array, as a uint32 array (T,)."""
    runs = groupby(ids, key=lambda i: isinstance(i, mx.array))
    parts = [mx.stack(list(run)) if late else mx.array(np.fromiter(run, np.uint32)) for late, run in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def adjust(row: mx.array, draw: Draw) -> mx.array:
    """Return (V,) logits after the bias, all penalties and the mask."""
    sampling = draw.sampling
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        row = row.at[mx.array(ids)].add(mx.array(values))
    row = penalize(row, draw.recent, sampling.repetition_penalty)
    if sampling.has_penalties:
        generated = draw.recent[draw.n_prompt :]
        row = penalize_generated(row, generated, sampling.frequency_penalty, sampling.presence_penalty)
    return row if draw.mask is None else mx.where(mx.array(draw.mask), row, -mx.inf)


def penalize(row: mx.array, recent: Sequence[Any], penalty: float) -> mx.array:
    """Return (V,) logits with the repetition penalty on the ids in `recent`."""
    if penalty == 1 or not recent:
        return row
    ids = id_array(recent)
    hit, penalty = row[ids], min(max(penalty, SMALLEST), LARGEST)
    penalized = mx.where(hit > 0, hit / penalty, hit * penalty)
    row = row + 0  # a copy: the caller's logits must not change
    row[ids] = mx.clip(penalized, -LARGEST, LARGEST)  # a repeated id is written twice, with the same value
    return row


def penalize_generated(row: mx.array, generated: Sequence[Any], frequency: float, presence: float) -> mx.array:
    """Return (V,) logits with the frequency and presence penalties on the generated ids."""
    if not generated:
        return row
    counts = mx.zeros(row.shape).at[id_array(generated)].add(1)  # a repeated id is counted each time
    return row - frequency * counts - presence * (counts > 0)


def drawn(row: mx.array, sampling: Sampling, u: float, real: mx.Dtype) -> mx.array:
    """Return the id that `u` selects from (V,) logits, computed in type `real`; the temperature must be > 0."""
    p = mx.exp((row.astype(real) - row.max()) / max(sampling.temperature, COLDEST))
    chosen_from = (p > 0) & _likeliest(p, sampling)
    kept = mx.where(chosen_from, p, 0)
    total = mx.cumsum(kept / kept.sum())
    ids = mx.arange(len(p), dtype=mx.uint32)
    reached = chosen_from & (total > u * total[-1])
    # For u close to 1, rounding may leave no sum above u times the total. Then choose the last token that is kept.
    last = mx.where(chosen_from, ids, 0).max()
    return mx.minimum(mx.where(reached, ids, len(p)).min(), last).astype(mx.uint32)


def _likeliest(p: mx.array, sampling: Sampling) -> mx.array:
    """Return (V,) bool: True for tokens that top-k, top-p and min-p keep. Of equally likely tokens, keep lower ids."""
    if sampling.top_k is None and sampling.top_p == 1:
        return p >= sampling.min_p * p.max()
    likely = -mx.sort(-p)[: sampling.top_k]
    likely = likely / likely.sum()
    n = mx.array(len(likely))
    if sampling.top_p < 1:
        # Exclude each token's own probability from its cumulative sum: the token that reaches top_p is kept, too.
        reached = mx.cumsum(likely) - likely
        n = mx.maximum(1, (reached < sampling.top_p).sum())
    n = mx.minimum(n, (likely >= sampling.min_p * likely[0]).sum())
    return _first(p, n)


def _first(p: mx.array, n: mx.array) -> mx.array:
    """Return (V,) bool: True for the n largest values of p; of equal values, those with lower indices."""
    least = -mx.sort(-p)[n - 1]
    above, equal = p > least, p == least
    return above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= n - above.sum()))
