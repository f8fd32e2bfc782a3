"""A float32 matrix times vectors, in the order of summation of the Q8_0 kernels: for tensors that are not quantised.

MLX chooses among several float products by shape, so the bits of a row depend on the batch. With this kernel they do
not. For prompts this kernel is slower than MLX's, because it does not use matrix units.
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
# MLX passes smaller arrays in another address space: see `in_device_memory`.
NARROWEST = 8


def dense(x: mx.array, weight: mx.array, *, tuning: Tuning | None = None) -> mx.array:
    """Compute `x @ weight.T` for any number of vectors.

    Args:
        x: (V, K) float32, any V, K from 8 on.
        weight: (N, K) float32.
        tuning: rows and SIMD-groups. The result's bits depend neither on the tuning nor on the number of vectors.

    Returns:
        (V, N) float32, within 4 roundings of `sum(|x| * |weight|)`.

    Raises:
        ValueError: x or the matrix do not fit.
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
