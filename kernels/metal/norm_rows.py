"""Rows times a norm's gain, and the factors that make them an RMSNorm: what comes before a product of many vectors.

A kernel that multiplies up to eight vectors takes their norm itself. For more of them each SIMD-group would take the
same squares again, and that costs more than a launch. The squares are added up in the order of those kernels, so that
a row has the same bits either way.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kernels.kernel import Kernel
from kernels.launch import Size, launch
from kernels.metal import arguments
from kernels.metal.layout import BLOCK
from kernels.metal.rows import LANE_ROWS
from kernels.metal.twins import EPSILON, FACTOR, Expected, wide

KERNEL = Kernel.load("norm_rows", ["x", "gain", "eps"], ["rows", "factors"])
SIMDGROUPS = 4


def grid(vectors: int) -> tuple[Size, Size]:
    """Threads, and threads of a group: eight lanes have a row, a SIMD-group four."""
    n = LANE_ROWS * SIMDGROUPS
    return (-(-vectors // n) * SIMDGROUPS * 32, 1, 1), (SIMDGROUPS * 32, 1, 1)


def norm_rows(x: mx.array, gain: mx.array, eps: float, whole: bool = False) -> tuple[mx.array, mx.array]:
    """`x * gain`, and `1 / sqrt(mean(x**2) + eps)` of each row.

    Args:
        x: (V, K) float16 or float32, any V, K a multiple of 32.
        gain: (K,) float16 or float32.
        eps: what is added to the mean square.
        whole: multiply the rows by their factors: an RMSNorm.

    Returns:
        Rows (V, K) and factors (V,), both float32. The bound is in `twin`.

    Raises:
        ValueError: x or the gain do not fit.
    """
    K = x.shape[-1]
    V = arguments.vectors("norm_rows", x, K)
    arguments.array("norm_rows", "gain", gain, (K,), *arguments.ACTIVATIONS)
    arguments.same("norm_rows", f"columns modulo {BLOCK}", K % BLOCK, 0)
    threads, group = grid(V)
    rows, factors = launch(
        KERNEL,
        [x, gain, arguments.constants(eps)],
        template=(("K", K), ("WHOLE", whole), ("NSG", SIMDGROUPS)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, K), (V,)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return rows, factors


def twin(x: mx.array, gain: mx.array, eps: float, whole: bool = False) -> list[Expected]:
    """The same in float64: one rounding for `x * gain`, the factor's, and one to multiply by it."""
    numbers = wide(x)
    factors = 1 / np.sqrt(np.mean(np.square(numbers), axis=-1) + np.float32(eps))
    rows = numbers * wide(gain) * (factors[:, None] if whole else 1)
    roundings = 1 + (FACTOR + 1 if whole else 0)
    return [
        Expected(rows, roundings * EPSILON * np.abs(rows)),
        Expected(factors, FACTOR * EPSILON * factors),
    ]
