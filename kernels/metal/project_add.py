"""Multiply and add to the residual stream: the output projection of attention, the down projection of the FFN.

The product has the same bits as `matvec`; the addition needs no separate launch.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix
from .reference import EPSILON, Expected, products, wide
from .rows import Tuning, default_tuning, geometry, k_split

KERNEL = Kernel.load("project_add", ["x", "wq", "ws", "residual"], ["y"])


def project_add(x: mx.array, weight: StoredMatrix, residual: mx.array, *, tuning: Tuning | None = None) -> mx.array:
    """Compute `residual + x @ weight.T`, (V, N), for x (V, K) of float16 or float32, and a float32 residual (V, N).

    The error is at most `4 * 2**-24 * sum(|x| * |weight|)`, plus one rounding of the result. The bits of a row
    depend neither on V, which may be any number, nor on `tuning`.

    Raises:
        ValueError: x or the residual has a wrong shape or type.
    """
    N, K = weight.shape
    V = arguments.vectors("project_add", x, K)
    arguments.array("project_add", "residual", residual, (V, N), mx.float32)
    g = geometry((N,), V, tuning or default_tuning(N, V), k_split(N, K, V))
    (y,) = launch(
        KERNEL,
        [x, *weight.inputs, residual],
        template=(("W", weight.layout.code), ("N", N), ("K", K), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(x: mx.array, weight: StoredMatrix, residual: mx.array) -> Expected:
    """Return the expected result in float64, with the error bound: that of the product, plus one rounding."""
    value, bound = products(wide(x), weight)
    total = value + wide(residual)
    return Expected(total, bound + EPSILON * (np.abs(total) + bound))
