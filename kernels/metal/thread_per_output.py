"""Rung 1 of the Q8_0 ladder: one thread per output.

The ladder is four kernels, its rungs, for the same product, from slow to fast; the engine uses rung 3, `matvec`. This
kernel is the simplest one. It is slow, because 32 adjacent threads read from 32 rows: every load of a SIMD-group
touches 32 cache lines, and reads one byte of each. Also, for one vector, a matrix of a few thousand rows keeps only a
few thousand threads busy.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .formats import Q8_0Matrix
from .reference import SEQUENTIAL, Expected, products, wide

KERNEL = Kernel.load("thread_per_output", ["x", "wq", "ws"], ["y"])
THREADS = 64


def grid(n_rows: int, vectors: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: thread (n, v) computes output n of vector v, if n < `n_rows`."""
    return (-(-n_rows // THREADS) * THREADS, vectors, 1), (THREADS, 1, 1)


def thread_per_output(x: mx.array, weight: Q8_0Matrix) -> mx.array:
    """Compute `x @ weight.T`, (V, N) float32, for x (V, K) of float16 or float32, with any number V of vectors.

    The error is at most `8 * 2**-24 * sum(|x| * |weight|)`.

    Raises:
        ValueError: x or the matrix has a wrong shape or type.
    """
    N, K = weight.shape
    arguments.q8_0("thread_per_output", weight)
    V = arguments.vectors("thread_per_output", x, K)
    threads, group = grid(N, V)
    (y,) = launch(
        KERNEL,
        [x, weight.wq, weight.ws],
        template=(("N", N), ("K", K)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(x: mx.array, weight: Q8_0Matrix) -> Expected:
    """Return the expected result in float64, with the error bound."""
    return products(wide(x), weight, SEQUENTIAL)
