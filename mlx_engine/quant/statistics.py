"""Statistics of a stored weight's values, computed a piece at a time: a large tensor is never converted whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.quant.weight import Weight

# Values converted at a time.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Statistics:
    """Of `n` values; `std` is the population's, and values that are no finite numbers count like in NumPy.

    Of no values at all nothing is known: all is None but `n` and `n_not_finite`.
    """

    n: int
    n_not_finite: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


def statistics(weight: Weight) -> Statistics:
    """Least, largest, mean and standard deviation of the values that the stored bytes stand for, in float64.

    Raises:
        UnsupportedTypeError: the type is known but cannot be read.
    """
    n = n_not_finite = 0
    low, high, mean, squares = math.inf, -math.inf, 0.0, 0.0
    with np.errstate(invalid="ignore"):  # infinities may meet
        for values in _pieces(weight):
            n_not_finite += values.size - int(np.count_nonzero(np.isfinite(values)))
            low, high = float(np.minimum(low, values.min())), float(np.maximum(high, values.max()))
            # Two sets' means and sums of squared deviations make those of their union.
            piece_mean, shift = float(values.mean()), float(values.mean()) - mean
            n += values.size
            mean += shift * values.size / n
            squares += float(((values - piece_mean) ** 2).sum()) + shift**2 * values.size * (n - values.size) / n
    if not n:
        return Statistics(0, 0, None, None, None, None)
    return Statistics(n, n_not_finite, low, high, mean, math.sqrt(squares / n))


def first_values(weight: Weight, n: int) -> NDArray[np.float32]:
    """The first `n` values in row-major order, or all if there are fewer; no other block is read.

    Raises:
        UnsupportedTypeError: the type is known but cannot be read.
    """
    n_blocks = -(-n // weight.type.block_size)
    raw = weight.data[: n_blocks * weight.type.block_bytes]
    return quant.dequantize(raw, weight.type, where=f"tensor {weight.name!r}")[:n]


def _pieces(weight: Weight) -> Iterator[NDArray[np.float64]]:
    step = _PIECE // weight.type.block_size * weight.type.block_bytes
    for start in range(0, weight.nbytes, step):
        raw = weight.data[start : start + step]
        yield quant.dequantize(raw, weight.type, where=f"tensor {weight.name!r}").astype(np.float64)
