"""Multiply by a float32 matrix that is not quantised, in the order of summation of the kernels for quantised weights.

MLX has several kernels for such products and chooses one by the shape of x, so the bits of a row of its result depend
on the number of rows. For prompts, the kernel of this module is slower than MLX's kernels, because it does not use
matrix units.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .reference import EPSILON, PRODUCT, Expected, wide
from .rows import Tuning, default_tuning, geometry

KERNEL = Kernel.load("dense", ["x", "w"], ["y"])
# The smallest K. MLX passes arrays of fewer than eight elements as `constant`, but the kernel expects `device` memory.
NARROWEST = 8


def dense(x: mx.array, weight: mx.array, *, tuning: Tuning | None = None) -> mx.array:
    """Compute `x @ weight.T`, (V, N), for x (V, K) and weight (N, K), all float32; K is at least 8, and V any number.

    The error is at most `4 * 2**-24 * sum(|x| * |weight|)`. The bits of a row depend neither on V nor on `tuning`.

    Raises:
        ValueError: x or the matrix has a wrong shape or type.
    """
    N, K = weight.shape
    arguments.array("dense", "weight", weight, (N, K), mx.float32)
    V = arguments.vectors("dense", x, K)
    arguments.array("dense", "x", x, (V, K), mx.float32)
    if K < NARROWEST:
        raise ValueError(f"dense: expected K from {NARROWEST} on, found {K}")
    g = geometry((N,), V, tuning or default_tuning(N, V))
    (y,) = launch(
        KERNEL,
        [x, weight],
        template=(("N", N), ("K", K), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(x: mx.array, weight: mx.array) -> Expected:
    """Return the expected result in float64, with the error bound."""
    a, w = wide(x), wide(weight)
    return Expected(a @ w.T, PRODUCT * EPSILON * (np.abs(a) @ np.abs(w).T))
