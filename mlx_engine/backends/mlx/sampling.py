"""Sampling on the device: the algorithm of `sampling.py` in lazy MLX operations, so that the host need not wait.

Ids may be ints or unevaluated arrays. Probabilities are float64 on the CPU. On a GPU MLX has no float64, so they are
float32; if the random number is within rounding error of the border between two tokens, the other token may be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.backends.sampling import LARGEST, SMALLEST, Draw
from mlx_engine.options import Sampling

# A GPU flushes smaller temperatures to 0, which would be a division by zero.
COLDEST = float(np.finfo(np.float32).tiny)


def id_array(ids: Sequence[Any]) -> mx.array:
    """Return ids as uint32 (T,) for T > 0; an id is an int or a zero-dimensional array."""
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


def draw(row: mx.array, sampling: Sampling, u: float, real: mx.Dtype) -> mx.array:
    """Return the id that `u` selects from (V,) logits, computed in type `real`; the temperature must be > 0."""
    p = mx.exp((row.astype(real) - row.max()) / max(sampling.temperature, COLDEST))
    chosen_from = (p > 0) & _likeliest(p, sampling)
    kept = mx.where(chosen_from, p, 0)
    total = mx.cumsum(kept / kept.sum())
    ids = mx.arange(len(p), dtype=mx.uint32)
    reached = chosen_from & (total > u * total[-1])
    # For u close to 1, rounding may leave no token above u; then the last possible token is chosen.
    last = mx.where(chosen_from, ids, 0).max()
    return mx.minimum(mx.where(reached, ids, len(p)).min(), last).astype(mx.uint32)


def _likeliest(p: mx.array, sampling: Sampling) -> mx.array:
    """Return (V,) bool, the tokens that top-k, top-p and min-p keep; of equally likely tokens, lower ids first."""
    if sampling.top_k is None and sampling.top_p == 1:
        return p >= sampling.min_p * p.max()
    likely = -mx.sort(-p)[: sampling.top_k]
    likely = likely / likely.sum()
    n = mx.array(len(likely))
    if sampling.top_p < 1:
        # The token whose probability makes the sum reach top_p is kept, so compare the sum before each token.
        reached = mx.cumsum(likely) - likely
        n = mx.maximum(1, (reached < sampling.top_p).sum())
    n = mx.minimum(n, (likely >= sampling.min_p * likely[0]).sum())
    return _first(p, n)


def _first(p: mx.array, n: mx.array) -> mx.array:
    """Return (V,) bool, the n largest of p; of equal values, the first."""
    least = -mx.sort(-p)[n - 1]
    above, equal = p > least, p == least
    return above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= n - above.sum()))
