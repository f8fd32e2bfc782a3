"""Rung 3 of the Q8_0 ladder: several rows per SIMD-group, 16 weights per load, eight vectors at a time.

This is faster than one SIMD-group per row: a lane loads 16 bytes at once, so four times as many bytes are in flight,
and each load of x is used for several rows. With up to eight vectors the weights, nearly all of the memory traffic, are
still read once.

The order of summation depends only on K, not on the number of rows, vectors or threads.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix
from .reference import Expected, products, wide
from .rows import Tuning, default_tuning, geometry, k_split

KERNEL = Kernel.load("matvec", ["x", "wq", "ws"], ["y"])


def matvec(
    x: mx.array, weight: StoredMatrix, *, dtype: mx.Dtype = mx.float32, tuning: Tuning | None = None
) -> mx.array:
    """Compute `x @ weight.T` for any number of vectors.

    Args:
        x: (V, K) float16, bfloat16 or float32, any V.
        weight: (N, K), of any stored type.
        dtype: the type of the result: that of x, or float32.
        tuning: rows and SIMD-groups. The result's bits depend neither on the tuning nor on the number of vectors.

    Returns:
        (V, N), within 4 roundings to float32 of `sum(|x| * |weight|)`, then rounded to `dtype`.

    Raises:
        ValueError: x or the type do not fit.
    """
    N, K = weight.shape
    V = arguments.vectors("matvec", x, K, mx.bfloat16)
    if dtype not in (x.dtype, mx.float32):
        raise ValueError(f"matvec: expected a result of float32 or of {arguments.word(x.dtype)}, found {dtype}")
    g = geometry((N,), V, tuning or default_tuning(N, V), k_split(N, K, V))
    (y,) = launch(
        KERNEL,
        [x, *weight.inputs],
        template=(("W", weight.layout.code), ("N", N), ("K", K), ("Y", dtype), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[dtype],
    )
    return y


def reference(x: mx.array, weight: StoredMatrix) -> Expected:
    """Return the expected result in float64, with the error bound."""
    return products(wide(x.astype(mx.float32)), weight)
