"""The choice of a token where the logits are: `sampling.py` once more, in MLX operations that nobody has to wait for.

Ids may be whole numbers or choices that are not known yet. Probabilities are float64 where MLX has it, on the CPU, and
float32 on a GPU: there a draw that falls within rounding of the border between two tokens may choose the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.backends.sampling import Sampling

# A GPU takes smaller temperatures for 0, and nothing is divided by that.
COLDEST = float(np.finfo(np.float32).tiny)


def id_array(ids: Sequence[Any]) -> mx.array:
    """uint32 (T,) for T > 0: ids that may be whole numbers, or arrays of no dimension that hold one."""
    runs = groupby(ids, key=lambda i: isinstance(i, mx.array))
    parts = [mx.stack(list(run)) if late else mx.array(np.fromiter(run, np.uint32)) for late, run in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def penalize(row: mx.array, recent: Sequence[Any], penalty: float) -> mx.array:
    """(V,) logits with the repetition penalty on the ids in `recent`."""
    if penalty == 1 or not recent:
        return row
    ids = id_array(recent)
    hit = row[ids]
    row = row + 0  # the caller's logits stay as they are
    row[ids] = mx.where(hit > 0, hit / penalty, hit * penalty)  # an id that comes twice gets the same value twice
    return row


def draw(row: mx.array, sampling: Sampling, u: float, real: mx.Dtype) -> mx.array:
    """The id that `u` selects from (V,) logits; the temperature must be > 0, and `real` is the type to compute in."""
    p = mx.exp((row.astype(real) - row.max()) / max(sampling.temperature, COLDEST))
    chosen_from = (p > 0) & _likeliest(p, sampling)
    kept = mx.where(chosen_from, p, 0)
    total = mx.cumsum(kept / kept.sum())
    ids = mx.arange(len(p), dtype=mx.uint32)
    reached = chosen_from & (total > u * total[-1])
    # A draw within rounding of 1 can land past the end; the last possible token is the one it meant.
    last = mx.where(chosen_from, ids, 0).max()
    return mx.minimum(mx.where(reached, ids, len(p)).min(), last).astype(mx.uint32)


def _likeliest(p: mx.array, sampling: Sampling) -> mx.array:
    """(V,) bool: top-k, top-p and min-p. Each keeps some number of the likeliest, of equal ones the lower ids."""
    if sampling.top_k is None and sampling.top_p == 1:
        return p >= sampling.min_p * p.max()
    likely = -mx.sort(-p)[: sampling.top_k]
    likely = likely / likely.sum()
    n = mx.array(len(likely))
    if sampling.top_p < 1:
        # The token that reaches p stays: it is the first whose predecessors do not reach it.
        reached = mx.cumsum(likely) - likely
        n = mx.maximum(1, (reached < sampling.top_p).sum())
    n = mx.minimum(n, (likely >= sampling.min_p * likely[0]).sum())
    return _first(p, n)


def _first(p: mx.array, n: mx.array) -> mx.array:
    """(V,) bool: the n largest of p, of equal ones the first."""
    least = -mx.sort(-p)[n - 1]
    above, equal = p > least, p == least
    return above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= n - above.sum()))
