"""The backend `scalar`: every operation in plain Python, element by element. All other backends are tested against it.

Arrays are nested lists of floats: (T, D) is a list of T lists of D floats. Python floats are float64, so sums and
products are float64. NumPy is used only to convert weights, inputs, results, and cached keys, values and states. This
backend is deliberately unoptimised: read it to learn what an operation computes, but use another backend to run models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVView, StateView, first_visible
from mlx_engine.backends.experts import ExpertLinear, Routing
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
from mlx_engine.backends.sampling import LARGEST, SMALLEST, Draw
from mlx_engine.options import Sampling
from mlx_engine.quant import key_values
from mlx_engine.quant.weight import Weight

# Added to the squared length of queries and keys in `delta_rule`, to avoid a division by zero.
TINY = 1e-6


class ScalarBackend(Backend):
    """The plain Python backend.

    A KV store is a tuple of two lists, keys and values, with one item per slot. If `n_arrays` is 1, the tuple has one
    list, whose items are both key and value.
    """

    name = "scalar"

    def prepare(self, weight: Weight) -> Native:
        return weight.dequantize().tolist()

    def array(self, values: np.ndarray) -> Native:
        return np.asarray(values, dtype=np.float32).tolist()

    def host(self, x: Native) -> np.ndarray:
        return np.array(x, dtype=np.float32)

    def embed(self, table: Native, ids: Sequence[Any]) -> Native:
        return table.rows(ids).tolist() if isinstance(table, Weight) else [table[i] for i in ids]

    def linear(self, x: Native, linear: Linear) -> Native:
        bias = linear.bias or [0.0] * len(linear.weight)
        return [[dot(row, w) + b for w, b in zip(linear.weight, bias, strict=True)] for row in x]

    def rms_norm(self, x: Native, weight: Native, eps: float) -> Native:
        return on_rows(lambda row: _rms_norm(row, weight, eps), x)

    def group_norm(self, x: Native, weight: Native, eps: float, n_groups: int) -> Native:
        of = range(0, len(weight), len(weight) // n_groups)
        width = len(weight) // n_groups
        parts = [[_rms_norm(row[i : i + width], weight[i : i + width], eps) for i in of] for row in x]
        return [[v for part in row for v in part] for row in parts]

    def layer_norm(self, x: Native, weight: Native, bias: Native, eps: float) -> Native:
        """Subtract the mean before squaring: `mean(x**2) - mean(x)**2` would lose digits by cancellation."""
        return on_rows(lambda row: _layer_norm(row, weight, bias, eps), x)

    def rope(self, x: Native, rope: Rope, positions: Sequence[int]) -> Native:
        return [[_rotate(head, rope, p) for head in heads] for heads, p in zip(x, positions, strict=True)]

    def attention(self, q: Native, kv: KVView, counts: Sequence[int], scores: Scores) -> Native:
        keys, values = kv.store[0], kv.store[-1]
        queries, out = iter(q), []
        for span, n in zip(kv.spans, counts, strict=True):
            for position in range(span.length - n, span.length):
                heads = next(queries)
                first = first_visible(kv.window, position)
                slots = [int(span.pages[p // kv.page]) + p % kv.page for p in range(first, position + 1)]
                group = len(heads) // len(keys[slots[0]])
                out.append(
                    [
                        _attend(
                            head,
                            [keys[s][h // group] for s in slots],
                            [values[s][h // group] for s in slots],
                            scores.scale,
                            scores.softcap,
                            [] if scores.sinks is None else [scores.sinks[h]],
                        )
                        for h, head in enumerate(heads)
                    ]
                )
        return out

    def silu(self, x: Native) -> Native:
        return [[v * sigmoid(v) for v in row] for row in x]

    def gelu(self, x: Native) -> Native:
        c = math.sqrt(2 / math.pi)
        return [[0.5 * v * (1 + math.tanh(c * (v + 0.044715 * v**3))) for v in row] for row in x]

    def gelu_erf(self, x: Native) -> Native:
        return [[0.5 * v * math.erfc(-v / math.sqrt(2)) for v in row] for row in x]

    def relu2(self, x: Native) -> Native:
        return [[max(v, 0.0) ** 2 for v in row] for row in x]

    def add(self, a: Native, b: Native) -> Native:
        return [[u + v for u, v in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

    def multiply(self, a: Native, b: Native) -> Native:
        return [[u * v for u, v in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

    def clamped_swiglu(self, gate: Native, up: Native) -> Native:
        return [[_clamped_swiglu(g, u) for g, u in zip(p, q, strict=True)] for p, q in zip(gate, up, strict=True)]

    def scale(self, x: Native, factor: float) -> Native:
        return [[v * factor for v in row] for row in x]

    def soft_cap(self, x: Native, cap: float) -> Native:
        return [[cap * math.tanh(v / cap) for v in row] for row in x]

    def heads(self, x: Native, head_dim: int) -> Native:
        return [[row[i : i + head_dim] for i in range(0, len(row), head_dim)] for row in x]

    def merge(self, x: Native) -> Native:
        return [[v for head in heads for v in head] for heads in x]

    def columns(self, x: Native, first: int, last: int) -> Native:
        return [row[first:last] for row in x]

    def concat(self, a: Native, b: Native) -> Native:
        return [[*p, *q] for p, q in zip(a, b, strict=True)]

    def take(self, x: Native, rows: Sequence[int]) -> Native:
        return [x[r] for r in rows]

    def route(self, logits: Native, routing: Routing) -> tuple[Native, Native]:
        scores = [[sigmoid(v) for v in row] if routing.scoring == "sigmoid" else _softmax(row) for row in logits]
        ranked = logits if routing.ranks_logits else [_ranked(row, routing) for row in scores]
        ids = [sorted(sorted(range(len(row)), key=lambda e: (-row[e], e))[: routing.n_used]) for row in ranked]
        return ids, [_weights(row, chosen, routing) for row, chosen in zip(scores, ids, strict=True)]

    def expert_linear(self, x: Native, linear: ExpertLinear, ids: Native) -> Native:
        chosen = [e for row in ids for e in row]
        each = len(chosen) // len(x)
        return [self.linear([x[i // each]], linear.weights[e])[0] for i, e in enumerate(chosen)]

    def head_linear(self, x: Native, linear: ExpertLinear) -> Native:
        return [
            [self.linear([head[: linear.shape[1]]], of)[0] for head, of in zip(heads, linear.weights, strict=True)]
            for heads in x
        ]

    def join_heads(self, a: Native, b: Native) -> Native:
        return [[p + q for p, q in zip(of_a, of_b, strict=True)] for of_a, of_b in zip(a, b, strict=True)]

    def combine(self, y: Native, weights: Native) -> Native:
        parts = iter(y)
        return [[dot(row, column) for column in zip(*(next(parts) for _ in row), strict=True)] for row in weights]

    def argmax(self, logits: Native) -> Native:
        (row,) = logits
        return row.index(max(row))

    def sample(self, logits: Native, draw: Draw) -> Native:
        (row,), sampling = logits, draw.sampling
        row = _adjusted(row, draw)
        top = max(row)
        if sampling.is_greedy:
            return row.index(top)
        p = [math.exp((v - top) / sampling.temperature) for v in row]
        kept = _likely(p, sampling)
        left = draw.u * sum(p[i] for i in kept)
        for i in sorted(kept):
            left -= p[i]
            if left < 0:
                return i
        return max(kept)

    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int, n_arrays: int = 2) -> Native:
        return tuple([None] * n_slots for _ in range(n_arrays))

    def kv_write(self, store: Native, slots: np.ndarray, k: Native, v: Native) -> Native:
        if self.kv_type != "f32":
            k, v = (key_values.expanded(key_values.stored(self.host(x), self.kv_type), self.kv_type) for x in (k, v))
            k, v = k.tolist(), v.tolist()
        for t, slot in enumerate(slots):
            store[0][slot], store[-1][slot] = k[t], v[t]
        return store

    def kv_copy(self, store: Native, source: int, target: int, n: int) -> Native:
        for slots in store:
            slots[target : target + n] = slots[source : source + n]
        return store

    def kv_read(self, store: Native, first: int, n: int) -> np.ndarray:
        """Return float64, like `state_read`, because this backend does not round to float32."""
        return np.array([slots[first : first + n] for slots in store]).transpose(0, 2, 1, 3)

    def kv_restore(self, store: Native, first: int, values: np.ndarray) -> Native:
        n = values.shape[2]
        for slots, of in zip(store, values.transpose(0, 2, 1, 3).tolist(), strict=True):
            slots[first : first + n] = of
        return store

    def kv_nbytes(self, store: Native) -> int:
        """Count 8 bytes for each float in a filled slot, without Python's overhead for lists."""
        return sum(8 * len(head) for slots in store for slot in slots if slot is not None for head in slot)

    # ---- recurrent states: convolutions, delta rules and state spaces ----
    # In this section, a store is a list of slots, each with one nested list of floats.

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        return [_zeros(shape) for _ in range(n_slots)]

    def state_read(self, store: Native, slot: int) -> np.ndarray:
        return np.array(store[slot])

    def state_restore(self, store: Native, slot: int, values: np.ndarray) -> None:
        store[slot] = values.tolist()

    def state_nbytes(self, store: Native) -> int:
        return 8 * sum(map(_count, store))

    def convolve(self, x: Native, conv: Convolution, state: StateView) -> Native:
        out, width = [], len(conv.weight)
        bias = conv.bias or [0.0] * len(conv.weight[0])
        for first, n, source, target in state.runs.tolist():
            rows = [*state.store[source], *x[first : first + n]]
            for t in range(n):
                taps = rows[t : t + width]
                columns = zip(_columns(conv.weight, taps), bias, strict=True)
                out.append([sum(w * v for w, v in zip(*column, strict=True)) + b for column, b in columns])
            state.store[target] = rows[n:]
        return out

    def delta_rule(self, x: Native, beta: Native, step: Native, rule: DeltaRule, state: StateView) -> Native:
        out = []
        for first, n, source, target in state.runs.tolist():
            matrices = state.store[source]
            for t in range(first, first + n):
                made = [_head(x[t], beta[t][h], step[t][h], rule, h, matrices[h]) for h in range(rule.n_value_heads)]
                matrices = [matrix for matrix, _ in made]
                out.append([y for _, y in made])
            state.store[target] = matrices
        return out

    def state_space(self, x: Native, step: Native, space: StateSpace, state: StateView) -> Native:
        out = []
        for first, n, source, target in state.runs.tolist():
            matrices = state.store[source]
            for t in range(first, first + n):
                made = [_space(x[t], step[t][h], space, h, matrices[h]) for h in range(space.n_heads)]
                matrices = [matrix for matrix, _ in made]
                out.append([y for _, y in made])
            state.store[target] = matrices
        return out

    def sigmoid(self, x: Native) -> Native:
        return [[sigmoid(v) for v in row] for row in x]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the dot product, in float64."""
    return sum(map(mul, a, b), 0.0)


def on_rows(f: Callable[[list[float]], list[float]], x: Native) -> Native:
    """Apply f to the innermost lists of x, at any depth."""
    return [on_rows(f, y) for y in x] if isinstance(x[0], list) else f(x)


def _rms_norm(row: list[float], weight: list[float], eps: float) -> list[float]:
    factor = 1 / math.sqrt(dot(row, row) / len(row) + eps)
    return [w * v * factor for w, v in zip(weight, row, strict=True)]


def _layer_norm(row: list[float], weight: list[float], bias: list[float], eps: float) -> list[float]:
    mean = sum(row) / len(row)
    centered = [v - mean for v in row]
    factor = 1 / math.sqrt(dot(centered, centered) / len(row) + eps)
    return [w * v * factor + b for w, v, b in zip(weight, centered, bias, strict=True)]


def _rotate(head: list[float], rope: Rope, position: int) -> list[float]:
    half = len(head) // 2
    if len(rope.frequencies) != half:
        raise ValueError(f"heads of {len(head)} need {half} rotary frequencies, not {len(rope.frequencies)}")
    out = list(head)
    lengths = rope.lengths or (1.0,) * half
    growth = 1.0 if rope.growth is None else rope.growth.at(position)
    for j, (frequency, length) in enumerate(zip(rope.frequencies, lengths, strict=True)):
        angle, size = position * frequency, growth * length
        cos, sin = size * math.cos(angle), size * math.sin(angle)
        out[j] = head[j] * cos - head[j + half] * sin
        out[j + half] = head[j + half] * cos + head[j] * sin
    return out


def _attend(
    q: list[float], keys: list[list[float]], values: list[list[float]], scale: float, softcap: float | None,
    sinks: list[float],
) -> list[float]:  # fmt: skip
    scores = [dot(q, k) * scale for k in keys]
    if softcap is not None:
        scores = [softcap * math.tanh(s / softcap) for s in scores]
    top = max(scores + sinks)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights) + sum(math.exp(s - top) for s in sinks)
    return [sum(w * v[e] for w, v in zip(weights, values, strict=True)) / total for e in range(len(values[0]))]


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    powers = [math.exp(v - top) for v in row]
    total = sum(powers)
    return [power / total for power in powers]


def _ranked(scores: list[float], routing: Routing) -> list[float]:
    """Return the scores plus the bias; minus infinity for experts outside the k best of n groups (`Routing.groups`)."""
    row = scores if routing.bias is None else [s + b for s, b in zip(scores, routing.bias, strict=True)]
    if routing.groups is None:
        return row
    n, k = routing.groups
    size = len(row) // n
    sums = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(n)]
    kept = sorted(range(n), key=lambda g: (-sums[g], g))[:k]
    return [v if e // size in kept else -math.inf for e, v in enumerate(row)]


def _weights(scores: list[float], chosen: list[int], routing: Routing) -> list[float]:
    total = sum(scores[e] for e in chosen) + routing.sum_eps if routing.normalize else 1.0
    scales = [1.0] * len(scores) if routing.scales is None else routing.scales
    return [scores[e] / total * scales[e] for e in chosen]


def _clamped_swiglu(gate: float, up: float) -> float:
    g, u = min(gate, SWIGLU_LIMIT), min(max(up, -SWIGLU_LIMIT), SWIGLU_LIMIT)
    return (u + 1) * g * sigmoid(SWIGLU_ALPHA * g)


def _adjusted(row: list[float], draw: Draw) -> list[float]:
    """Return the logits after the bias, the repetition, frequency and presence penalties, and the mask."""
    row, sampling, recent = list(row), draw.sampling, cast(Sequence[int], draw.recent)
    for i, bias in sampling.logit_bias:
        row[i] += bias
    penalty = min(max(sampling.repetition_penalty, SMALLEST), LARGEST)
    for i in set(recent):
        penalized = row[i] / penalty if row[i] > 0 else row[i] * penalty
        row[i] = min(max(penalized, -LARGEST), LARGEST)
    for i, count in Counter(recent[draw.n_prompt :]).items():
        row[i] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return (
        row if draw.mask is None else [v if allowed else -math.inf for v, allowed in zip(row, draw.mask, strict=True)]
    )


def _likely(p: list[float], sampling: Sampling) -> list[int]:
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: sampling.top_k]
    total, reached = sum(p[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        full = sampling.top_p < 1 and reached >= sampling.top_p
        if kept and (full or p[i] < sampling.min_p * p[order[0]]):
            break
        kept.append(i)
        reached += p[i] / total
    return kept


def sigmoid(v: float) -> float:
    """Return `1 / (1 + exp(-v))`. Call exp only with values <= 0, so that it cannot overflow."""
    if v >= 0:
        return 1 / (1 + math.exp(-v))
    e = math.exp(v)
    return e / (1 + e)


def _head(
    row: list[float], beta: float, step: float, rule: DeltaRule, head: int, matrix: list[list[float]]
) -> tuple[list[list[float]], list[float]]:
    """Apply the delta rule to one token; return the new matrix (E, P) of a value head, and the head's output (P,)."""
    dim, width, keys = rule.key_dim, rule.value_dim, rule.n_key_heads * rule.key_dim
    at, value_at = rule.key_head(head) * dim, 2 * keys + head * width
    q, k = _unit(row[at : at + dim]), _unit(row[keys + at : keys + at + dim])
    v = row[value_at : value_at + width]
    decay = math.exp(rule.rate[head] * _softplus(step + rule.dt_bias[head]))
    matrix = [[decay * m for m in line] for line in matrix]
    known = [sum(k[e] * matrix[e][p] for e in range(dim)) for p in range(width)]
    strength = sigmoid(beta)
    change = [strength * (v[p] - known[p]) for p in range(width)]
    matrix = [[m + k[e] * d for m, d in zip(line, change, strict=True)] for e, line in enumerate(matrix)]
    return matrix, [sum(q[e] * matrix[e][p] for e in range(dim)) / math.sqrt(dim) for p in range(width)]


def _space(
    row: list[float], step: float, space: StateSpace, head: int, matrix: list[list[float]]
) -> tuple[list[list[float]], list[float]]:
    """Apply a state space to one token; return the new matrix (N, P) of a head, and the head's output (P,)."""
    width, dim, inner = space.head_dim, space.state_dim, space.n_heads * space.head_dim
    at = inner + head * space.n_groups // space.n_heads * dim
    x, b = row[head * width : (head + 1) * width], row[at : at + dim]
    at += space.n_groups * dim
    c, time, skip = row[at : at + dim], _softplus(step + space.dt_bias[head]), space.skip[head]
    decay = math.exp(space.rate[head] * time)
    matrix = [
        [decay * m + e * time * v for m, v in zip(line, x, strict=True)] for e, line in zip(b, matrix, strict=True)
    ]
    read = [dot(c, column) for column in zip(*matrix, strict=True)]
    return matrix, [y + skip * v for y, v in zip(read, x, strict=True)]


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _unit(x: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in x) + TINY)
    return [v / length for v in x]


def _columns(weight: Native, rows: Native) -> Native:
    """Return a pair for each channel: its weights, and its inputs."""
    return zip(zip(*weight, strict=True), zip(*rows, strict=True), strict=True)


def _zeros(shape: tuple[int, ...]) -> Native:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def _count(x: Native) -> int:
    return sum(map(_count, x)) if isinstance(x, list) else 1
