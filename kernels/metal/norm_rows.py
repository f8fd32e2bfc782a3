"""RMSNorm in a launch of its own, before a product with more than eight vectors, or without a product (`whole`).

The kernel multiplies rows by the norm weight and returns each row's factor `1 / sqrt(mean(x**2) + eps)`; the product
kernel multiplies its sums by the factors. For up to eight vectors, the product kernel computes the norm itself: each of
its SIMD-groups sums the squares of the vectors again. With more vectors, this would cost more than another launch. Both
kernels sum squares in the same order, so the bits of a row do not depend on the number of vectors.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .layout import BLOCK
from .reference import EPSILON, FACTOR, Expected, wide
from .rows import LANE_ROWS

KERNEL = Kernel.load("norm_rows", ["x", "norm_weight", "eps"], ["rows", "factors"])
SIMDGROUPS = 4


def grid(vectors: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: eight lanes process a row, a SIMD-group four rows."""
    n = LANE_ROWS * SIMDGROUPS
    return (-(-vectors // n) * SIMDGROUPS * 32, 1, 1), (SIMDGROUPS * 32, 1, 1)


def norm_rows(x: mx.array, norm_weight: mx.array, eps: float, whole: bool = False) -> tuple[mx.array, mx.array]:
    """Compute the rows `x * norm_weight`, (V, K), and the factor `1 / sqrt(mean(x**2) + eps)` of each, both float32.

    x is (V, K) of float16 or float32, K a multiple of 32; the norm weight is (K,) of float16 or float32. If `whole`,
    rows are also multiplied by their factors, which completes the RMSNorm.

    Raises:
        ValueError: x or the norm weight has a wrong shape or type.
    """
    K = x.shape[-1]
    V = arguments.vectors("norm_rows", x, K)
    arguments.array("norm_rows", "norm_weight", norm_weight, (K,), *arguments.ACTIVATIONS)
    if K % BLOCK:
        raise ValueError(f"norm_rows: expected K to be a multiple of {BLOCK}, found K = {K}")
    threads, group = grid(V)
    rows, factors = launch(
        KERNEL,
        [x, norm_weight, arguments.constants(eps)],
        template=(("K", K), ("WHOLE", whole), ("NSG", SIMDGROUPS)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, K), (V,)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return rows, factors


def reference(x: mx.array, norm_weight: mx.array, eps: float, whole: bool = False) -> list[Expected]:
    """Return the expected results in float64, with the error bounds.

    The bound of a row counts one rounding of `x * norm_weight`. If `whole`, it also counts `FACTOR` roundings of the
    factor, and one of the multiplication by the factor.
    """
    numbers = wide(x)
    factors = 1 / np.sqrt(np.mean(np.square(numbers), axis=-1) + np.float32(eps))
    rows = numbers * wide(norm_weight) * (factors[:, None] if whole else 1)
    roundings = 1 + (FACTOR + 1 if whole else 0)
    return [
        Expected(rows, roundings * EPSILON * np.abs(rows)),
        Expected(factors, FACTOR * EPSILON * factors),
    ]
