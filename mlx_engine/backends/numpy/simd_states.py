"""States on `simd` in plain NumPy: short convolutions and the gated delta rule, one token at a time.

Every sum has one order, whatever the number of tokens in the pass: a run of tokens in several passes has the same bits.
"""

from __future__ import annotations

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import StateView
from mlx_engine.backends.mixers import Convolution, DeltaRule
from mlx_engine.backends.numpy.scalar_states import TINY
from mlx_engine.backends.parameters import Native


class SimdStates(Backend):
    """A store is one array (slots, ...)."""

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        """The system maps the memory only when a slot is written."""
        return np.zeros((n_slots, *shape), dtype=np.float32)

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
            state.store[target] = rows[n:]
        return y

    def delta_rule(self, x: Native, beta: Native, step: Native, rule: DeltaRule, state: StateView) -> Native:
        q, k, v = split(x, rule)
        q, k = _unit(q) * np.float32(rule.key_dim**-0.5), _unit(k)
        heads = np.arange(rule.n_value_heads) % rule.n_key_heads
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

    def sigmoid(self, x: Native) -> Native:
        """For a very negative x the exponential overflows to infinity, and 1 / infinity is 0, which is correct."""
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-x))


def split(x: Native, rule: DeltaRule) -> tuple[Native, Native, Native]:
    """Return queries (T, G, E), keys (T, G, E) and values (T, H, P) of rows of all three; for NumPy and MLX."""
    n, keys = len(x), rule.n_key_heads * rule.key_dim
    q, k = (x[:, at : at + keys].reshape(n, rule.n_key_heads, rule.key_dim) for at in (0, keys))
    return q, k, x[:, 2 * keys :].reshape(n, rule.n_value_heads, rule.value_dim)


def _unit(x: Native) -> Native:
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + np.float32(TINY))
