"""Rung 4 of the Q8_0 ladder: tiles in the matrix units, for prompts.

The ladder is four kernels, its rungs, for the same product, from slow to fast. For many vectors, this kernel is faster
than rung 3, `matvec`: each expanded weight is multiplied with 16 or 32 vectors, by units that multiply 8 x 8 matrices.
Metal does not specify the order of summation in these units, so sums may differ from those of `matvec` in some bits.
If the engine used this kernel for prompts, a token's bits would depend on whether it is processed in a prompt or alone.
So the engine does not use it. `kernels bench --vectors` measures the speed of both kernels.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .layout import StoredMatrix
from .reference import EPSILON, SEQUENTIAL, Expected, products, wide

KERNEL = Kernel.load("tiles", ["x", "wq", "ws"], ["y"])
ROWS, THREADS = 64, 128
# The largest relative error of rounding to float16, for magnitudes from 2**-14 (smaller ones are subnormal) to 65,504.
HALF = 2.0**-11


def grid(n_rows: int, vectors: int) -> tuple[int, Size, Size]:
    """Return BM (vectors of a tile), grid and threadgroup; threadgroup (i, j) begins at row 64 i and vector BM j."""
    tile = 16 if vectors <= 16 else 32
    return tile, (-(-n_rows // ROWS) * THREADS, -(-vectors // tile), 1), (THREADS, 1, 1)


def tiles(x: mx.array, weight: StoredMatrix, *, half_tiles: bool = False) -> mx.array:
    """Compute `x @ weight.T`, (V, N) float32, for x (V, K) of float16 or float32, with any number V of vectors.

    Without `half_tiles`, the error is at most `8 * 2**-24 * sum(|x| * |weight|)`. With `half_tiles`, weights and x are
    rounded to float16, with a relative error of at most 5e-4 each; values of x beyond 65,504 overflow. `half_tiles`
    is faster on GPUs whose matrix units multiply float16 faster than float32.

    Raises:
        ValueError: x has a wrong shape or type.
    """
    N, K = weight.shape
    V = arguments.vectors("tiles", x, K)
    tile, threads, group = grid(N, V)
    (y,) = launch(
        KERNEL,
        [x, *weight.inputs],
        template=(
            ("W", weight.layout.code),
            ("N", N),
            ("K", K),
            ("BM", tile),
            ("TILE", mx.float16 if half_tiles else mx.float32),
        ),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(x: mx.array, weight: StoredMatrix, *, half_tiles: bool = False) -> Expected:
    """Return the expected result in float64, with the error bound (with `half_tiles`, including its roundings)."""
    inexact = (2 * HALF + HALF**2) / EPSILON if half_tiles else 0
    return products(wide(x), weight, SEQUENTIAL + inexact)
