"""What the kernels approximate, in float64, and how far they may be from it.

Bounds count roundings. A row's product is held to so many of them, relative to the sum of all its terms without signs.
At worst there could be more, one for each addition that a term passes through; but they do not all go one way.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.metal.layout import Q8_0Matrix, expanded

# What one rounding to float32 changes at most, relatively: half of what NumPy calls its epsilon.
EPSILON = 2.0**-24
# Where lanes share a row, a term passes through 15 additions of its sixteen, one for each sixteen of its stream, and 6.
PRODUCT = 4
# Where one thread, or a matrix unit, adds up a whole block: 32 + K / 32.
SEQUENTIAL = 8
# A factor of an RMSNorm: half of the squares' PRODUCT, of a division and of an addition, and the root's own two.
FACTOR = 5

Floats = NDArray[np.float64]


class Expected(NamedTuple):
    """A result in float64, and the largest error allowed in each number of it."""

    value: Floats
    bound: Floats


def wide(x: mx.array) -> Floats:
    """The numbers of an array, in float64."""
    return np.array(x).astype(np.float64)


def products(x: Floats, matrix: Q8_0Matrix, roundings: float = PRODUCT) -> Expected:
    """`x @ weight.T`, and so many roundings of the sum of all its terms without signs."""
    weight = expanded(matrix)
    return Expected(x @ weight.T, roundings * EPSILON * (np.abs(x) @ np.abs(weight).T))


def normed(x: mx.array, gain: mx.array, eps: float) -> Floats:
    """`gain * x / sqrt(mean(x**2) + eps)` over the last axis."""
    numbers = wide(x)
    factors: Floats = 1 / np.sqrt(np.mean(np.square(numbers), axis=-1, keepdims=True) + np.float32(eps))
    return numbers * factors * wide(gain)


def normed_products(
    x: mx.array, gain: mx.array, eps: float, matrix: Q8_0Matrix, factors: mx.array | None = None
) -> Expected:
    """Products of what `normed` gives: one rounding more for `x * gain`, the factor's, and one to multiply by it.

    With factors x has been multiplied by the gain, and only the factors are left: one rounding more.
    """
    if factors is not None:
        return products(wide(x) * wide(factors)[:, None], matrix, PRODUCT + 1)
    return products(normed(x, gain, eps), matrix, PRODUCT + 1 + FACTOR + 1)
