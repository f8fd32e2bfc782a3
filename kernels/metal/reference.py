"""Functions for the `reference` of each Metal kernel: expected results in float64, with error bounds.

A bound is a number of roundings times `EPSILON` times the sum of the absolute values of a dot product's terms. In the
worst case, the roundings are as many as the additions that a term passes through, because each addition rounds. The
bounds here allow fewer roundings, because roundings of random numbers partly cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .layout import StoredMatrix, expanded

# The largest relative error of rounding to float32: half of NumPy's epsilon.
EPSILON = 2.0**-24
# Roundings allowed in kernels whose lanes share a row. If eight lanes share a row, a term passes through up to 15
# additions in its group of 16 columns, and then through one for each later group of its lane. A few more add the sums
# of the lanes, and of the segments into which the columns are cut (products.h.metal).
PRODUCT = 4
# Roundings allowed in kernels where one thread or a matrix unit sums a row. If a kernel first sums blocks of 32
# columns, a term passes through up to 32 + K / 32 additions. In the prompt kernels, which have no such blocks, a term
# passes through up to K additions.
SEQUENTIAL = 8
# Roundings allowed in the factor of an RMSNorm, `rsqrt(mean(x**2) + eps)`: 3 + 2. The sum of squares has 4, the
# division by K one, the addition of epsilon one; the square root halves these 6. `rsqrt` itself has 2.
FACTOR = 5

Floats = NDArray[np.float64]


class Expected(NamedTuple):
    """A result in float64, and the largest error allowed in each of its elements."""

    value: Floats
    bound: Floats


def wide(x: mx.array) -> Floats:
    """Return an MLX array as a NumPy array of float64."""
    return np.array(x).astype(np.float64)


def products(x: Floats, matrix: StoredMatrix, roundings: float = PRODUCT) -> Expected:
    """Return `x @ weight.T`, with the bound `roundings * EPSILON * sum(|x| * |weight|)`."""
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
    """Return the product of a matrix with the RMSNorm of x.

    In addition to the product's roundings, the bound allows one for `x * norm_weight`, those of the norm's factor, and
    one for the multiplication by the factor. If `factors` (one per row of x) is given, x has already been multiplied by
    the norm weight; then only the multiplication by the factor adds a rounding.
    """
    if factors is not None:
        return products(wide(x) * wide(factors)[:, None], matrix, PRODUCT + 1)
    return products(normed(x, norm_weight, eps), matrix, PRODUCT + 1 + FACTOR + 1)
