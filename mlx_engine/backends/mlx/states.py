"""States on `mlx`: short convolutions and the gated delta rule, built from MLX operations, one token at a time."""

from __future__ import annotations

import mlx.core as mx

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import StateView
from mlx_engine.backends.mixers import Convolution, DeltaRule
from mlx_engine.backends.numpy.scalar_states import TINY
from mlx_engine.backends.numpy.simd_states import split
from mlx_engine.backends.parameters import Native


class MlxStates(Backend):
    """A store is a list of arrays, one per slot: a slot is written by replacing its array, so nothing is copied."""

    _stream: mx.Stream

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        self.guard.check()  # as in `kv_empty`
        return [mx.zeros(shape, stream=self._stream)] * n_slots

    def state_nbytes(self, store: Native) -> int:
        return sum(int(array.nbytes) for array in store)

    def convolve(self, x: Native, conv: Convolution, state: StateView) -> Native:
        outs = []
        for first, n, source, target in state.runs.tolist():
            rows = mx.concatenate([state.store[source], x[first : first + n]])
            y = rows[:n] * conv.weight[0]
            for w in range(1, len(conv.weight)):
                y = y + rows[w : w + n] * conv.weight[w]
            outs.append(y)
            # A view would keep the inputs of the whole pass in memory.
            state.store[target] = mx.contiguous(rows[n:])
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def delta_rule(self, x: Native, beta: Native, step: Native, rule: DeltaRule, state: StateView) -> Native:
        q, k, v = split(x, rule)
        repeated = [1, rule.n_value_heads // rule.n_key_heads, 1]
        q, k = (mx.tile(_unit(of), repeated) for of in (q, k))
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
        return mx.stack(outs)

    def sigmoid(self, x: Native) -> Native:
        return mx.sigmoid(x)


def _unit(x: Native) -> Native:
    return x / mx.sqrt((x * x).sum(axis=-1, keepdims=True) + TINY)
