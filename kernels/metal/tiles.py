"""Rung 4 of the Q8_0 ladder: tiles in the matrix units, for prompts.

Faster than `matvec` for many vectors because every weight that is read and expanded is multiplied with 16 or 32 of
them, by units that multiply 8 x 8 matrices. The order in which these units add is not specified, and differs from the
order of `matvec`. The `metal` backend therefore does not use this kernel; `kernels bench --vectors` measures it beside
`matvec`, which shows what one order of summation costs.
"""

from __future__ import annotations

import mlx.core as mx

from kernels.kernel import Kernel
from kernels.launch import Size, launch
from kernels.metal import arguments
from kernels.metal.layout import Q8_0Matrix
from kernels.metal.twins import EPSILON, SEQUENTIAL, Expected, products, wide

KERNEL = Kernel.load("tiles", ["x", "wq", "ws"], ["y"])
ROWS, THREADS = 64, 128
# What rounding to float16 changes at most, relatively, in a number that is neither tiny nor above 65,504.
HALF = 2.0**-11


def grid(n_rows: int, vectors: int) -> tuple[int, Size, Size]:
    """BM, vectors of a tile; threads; threads of a group: group (i, j) has rows from 64 i and vectors from BM j on."""
    tile = 16 if vectors <= 16 else 32
    return tile, (-(-n_rows // ROWS) * THREADS, -(-vectors // tile), 1), (THREADS, 1, 1)


def tiles(x: mx.array, weight: Q8_0Matrix, *, half_tiles: bool = False) -> mx.array:
    """`x @ weight.T` for any number of vectors.

    Args:
        x: (V, K) float16 or float32, any V.
        weight: (N, K).
        half_tiles: faster where matrix units take float16 faster, and *inexact*: weights and x are rounded to float16,
            2e-4 of a result; x beyond 65,504 overflows.

    Returns:
        (V, N) float32, within 8 roundings of `sum(|x| * |weight|)`.

    Raises:
        ValueError: x does not fit.
    """
    N, K = weight.shape
    V = arguments.vectors("tiles", x, K)
    tile, threads, group = grid(N, V)
    (y,) = launch(
        KERNEL,
        [x, weight.wq, weight.ws],
        template=(("N", N), ("K", K), ("BM", tile), ("TILE", mx.float16 if half_tiles else mx.float32)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def twin(x: mx.array, weight: Q8_0Matrix, *, half_tiles: bool = False) -> Expected:
    """The same in float64. Half tiles: each term is off by the rounding of its weight and of x."""
    inexact = (2 * HALF + HALF**2) / EPSILON if half_tiles else 0
    return products(wide(x), weight, SEQUENTIAL + inexact)
