"""States on `scalar`: short convolutions and the gated delta rule, element by element."""

from __future__ import annotations

import math

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import StateView
from mlx_engine.backends.mixers import Convolution, DeltaRule
from mlx_engine.backends.parameters import Native

# Added to the squared length of queries and keys.
TINY = 1e-6


class ScalarStates(Backend):
    """A store is a list of slots, each with one nested list of floats."""

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        return [_zeros(shape) for _ in range(n_slots)]

    def state_nbytes(self, store: Native) -> int:
        """Count 8 bytes for each float, without Python's overhead for lists."""
        return 8 * sum(map(_count, store))

    def convolve(self, x: Native, conv: Convolution, state: StateView) -> Native:
        out, width = [], len(conv.weight)
        for first, n, source, target in state.runs.tolist():
            rows = [*state.store[source], *x[first : first + n]]
            for t in range(n):
                taps = rows[t : t + width]
                out.append([sum(w * v for w, v in zip(*column, strict=True)) for column in _columns(conv.weight, taps)])
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

    def sigmoid(self, x: Native) -> Native:
        return [[sigmoid(v) for v in row] for row in x]


def sigmoid(v: float) -> float:
    """Return `1 / (1 + exp(-v))`: exp of a large positive number would overflow."""
    if v >= 0:
        return 1 / (1 + math.exp(-v))
    e = math.exp(v)
    return e / (1 + e)


def _head(
    row: list[float], beta: float, step: float, rule: DeltaRule, head: int, matrix: list[list[float]]
) -> tuple[list[list[float]], list[float]]:
    """Return the next matrix (E, P) of a value head, and its output (P,)."""
    dim, width, keys = rule.key_dim, rule.value_dim, rule.n_key_heads * rule.key_dim
    at, value_at = head % rule.n_key_heads * dim, 2 * keys + head * width
    q, k = _unit(row[at : at + dim]), _unit(row[keys + at : keys + at + dim])
    v = row[value_at : value_at + width]
    time = step + rule.dt_bias[head]
    decay = math.exp(rule.rate[head] * (max(time, 0.0) + math.log1p(math.exp(-abs(time)))))
    matrix = [[decay * m for m in line] for line in matrix]
    known = [sum(k[e] * matrix[e][p] for e in range(dim)) for p in range(width)]
    strength = sigmoid(beta)
    change = [strength * (v[p] - known[p]) for p in range(width)]
    matrix = [[m + k[e] * d for m, d in zip(line, change, strict=True)] for e, line in enumerate(matrix)]
    return matrix, [sum(q[e] * matrix[e][p] for e in range(dim)) / math.sqrt(dim) for p in range(width)]


def _unit(x: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in x) + TINY)
    return [v / length for v in x]


def _columns(weight: Native, rows: Native) -> Native:
    """Return for each channel its weights and its inputs."""
    return zip(zip(*weight, strict=True), zip(*rows, strict=True), strict=True)


def _zeros(shape: tuple[int, ...]) -> Native:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def _count(x: Native) -> int:
    return sum(map(_count, x)) if isinstance(x, list) else 1
