"""Rung 2 of the Q8_0 ladder: one SIMD-group per row.

The ladder is four kernels, its rungs, for the same product, from slow to fast; the engine uses rung 3, `matvec`. This
kernel is faster than rung 1, `thread_per_output`: the 32 lanes of a SIMD-group read 128 contiguous bytes of one row, so
a load touches one cache line; in rung 1, it touches 32. This kernel is slower than `matvec`, because each lane loads
only four weights at a time, and x is read again for every row.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .formats import Q8_0Matrix
from .reference import Expected, products, wide

KERNEL = Kernel.load("simd_per_row", ["x", "wq", "ws"], ["y"])
SIMDGROUPS = 4


def grid(n_rows: int, vectors: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: SIMD-group (n, v) multiplies row n with vector v."""
    return (-(-n_rows // SIMDGROUPS) * SIMDGROUPS * 32, vectors, 1), (SIMDGROUPS * 32, 1, 1)


def simd_per_row(x: mx.array, weight: Q8_0Matrix) -> mx.array:
    """Compute `x @ weight.T`, (V, N) float32, for x (V, K) of float16 or float32, with any number V of vectors.

    The error is at most `4 * 2**-24 * sum(|x| * |weight|)`.

    Raises:
        ValueError: x or the matrix has a wrong shape or type.
    """
    N, K = weight.shape
    arguments.q8_0("simd_per_row", weight)
    V = arguments.vectors("simd_per_row", x, K)
    threads, group = grid(N, V)
    (y,) = launch(
        KERNEL,
        [x, weight.wq, weight.ws],
        template=(("N", N), ("K", K), ("NSG", SIMDGROUPS)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(x: mx.array, weight: Q8_0Matrix) -> Expected:
    """Return the expected result in float64, with the error bound."""
    return products(wide(x), weight)
