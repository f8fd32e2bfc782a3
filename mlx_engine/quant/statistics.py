"""Statistics of a stored weight's values, for `inspect`. The weight is dequantised piece by piece, to save memory.

A type that cannot be dequantised raises UnsupportedTypeError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.quant.weight import Weight

# The number of values that `statistics` dequantises at a time.
_PIECE = 1 << 20
# The number of values that `not_finite` dequantises at a time: few enough for a core's L2 cache.
_SUMMED = 1 << 16


@dataclass(frozen=True)
class Statistics:
    """Statistics of `n` values. If `n` is 0, the floats are None. `std` divides by `n`. NaN and inf propagate."""

    n: int
    n_not_finite: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


def statistics(weight: Weight) -> Statistics:
    """Compute minimum, maximum, mean and standard deviation of the dequantised values in float64."""
    n = n_not_finite = 0
    low, high, mean, squares = math.inf, -math.inf, 0.0, 0.0
    with np.errstate(invalid="ignore"):  # inf - inf
        for piece in weight.pieces(_PIECE):
            values = piece.astype(np.float64)
            n_not_finite += values.size - int(np.count_nonzero(np.isfinite(values)))
            low, high = float(np.minimum(low, values.min())), float(np.maximum(high, values.max()))
            # Merge the means and the sums of squared deviations (Chan's parallel algorithm).
            piece_mean, shift = float(values.mean()), float(values.mean()) - mean
            n += values.size
            mean += shift * values.size / n
            squares += float(((values - piece_mean) ** 2).sum()) + shift**2 * values.size * (n - values.size) / n
    if not n:
        return Statistics(0, 0, None, None, None, None)
    return Statistics(n, n_not_finite, low, high, mean, math.sqrt(squares / n))


def first_values(weight: Weight, n: int) -> NDArray[np.float32]:
    """Return the first `n` values in row-major order, or fewer if the weight has fewer. Only their blocks are read."""
    n_blocks = -(-n // weight.type.block_size)
    raw = weight.data[: n_blocks * weight.type.block_bytes]
    return quant.dequantize(raw, weight.type, where=f"tensor {weight.name!r}")[:n]


@dataclass(frozen=True)
class NotFinite:
    """The number of values that are NaN or infinite, and the index of the first one in row-major order."""

    count: int
    first: int


def not_finite(weight: Weight) -> NotFinite | None:
    """Return the number and the first index of the values that are not finite; None if all values are finite."""
    count = seen = first = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for values in weight.pieces(_SUMMED):
            # A sum with NaN or infinity is not finite. A sum of finite values may overflow, so check each value.
            if not np.isfinite(values.sum()):
                bad = np.flatnonzero(~np.isfinite(values))
                first = seen + int(bad[0]) if len(bad) and not count else first
                count += len(bad)
            seen += values.size
    return NotFinite(count, first) if count else None
