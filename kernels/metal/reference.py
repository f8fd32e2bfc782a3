"""Expected results of kernels in float64, with error bounds.

Bounds count roundings, relative to the sum of the absolute terms of a product. The worst case has more roundings, one
per addition that a term passes through, but roundings partly cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .layout import StoredMatrix, expanded

# The largest relative error of rounding to float32: half of NumPy's epsilon.
EPSILON = 2.0**-24
# Lanes share a row: a term passes through 15 additions of its sixteen, one for each sixteen of its stream, and 6 more.
PRODUCT = 4
# One thread, or a matrix unit, sums a whole block: a term passes through 32 + K / 32 additions.
SEQUENTIAL = 8
# The factor of an RMSNorm: half of the roundings of the sum of squares, a division and an addition, and 2 of the root.
FACTOR = 5

Floats = NDArray[np.float64]


class Expected(NamedTuple):
    """A result in float64, and the largest error allowed in each number of it."""

    value: Floats
    bound: Floats


def wide(x: mx.array) -> Floats:
    """Return an array in float64."""
    return np.array(x).astype(np.float64)


def products(x: Floats, matrix: StoredMatrix, roundings: float = PRODUCT) -> Expected:
    """Return `x @ weight.T`, with a bound of `roundings` of the sum of absolute terms."""
    weight = expanded(matrix)
    return Expected(x @ weight.T, roundings * EPSILON * (np.abs(x) @ np.abs(weight).T))


def normed(x: mx.array, norm_weight: mx.array, eps: float) -> Floats:
    """Return `norm_weight * x / sqrt(mean(x**2) + eps)` over the last axis."""
    numbers = wide(x)
    factors: Floats = 1 / np.sqrt(np.mean(np.square(numbers), axis=-1, keepdims=True) + np.float32(eps))
    return numbers * factors * wide(norm_weight)


def normed_products(
    x: mx.array, norm_weight: mx.array, eps: float, matrix: StoredMatrix, factors: mx.array | None = None
) -> Expected:
    """Return products of normed rows. Roundings: `x * norm_weight`, the factor's, multiplication by the factor.

    With `factors`, x has already been multiplied by the norm weight, and only one rounding is added.
    """
    if factors is not None:
        return products(wide(x) * wide(factors)[:, None], matrix, PRODUCT + 1)
    return products(normed(x, norm_weight, eps), matrix, PRODUCT + 1 + FACTOR + 1)
