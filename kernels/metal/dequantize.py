"""Expand a whole quantised matrix to floats, for use outside of the engine, which multiplies quants directly.

For fewer than a few hundred vectors, multiplying by the expanded matrix is slower than multiplying by the quants,
because more bytes are read.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import Size, launch
from .layout import StoredMatrix, expanded
from .reference import Expected

KERNEL = Kernel.load("dequantize", ["wq", "ws"], ["y"])
THREADS = 256


def grid(n_weights: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: thread i expands weights 16 i to 16 i + 15."""
    return (-(-n_weights // (16 * THREADS)) * THREADS, 1, 1), (THREADS, 1, 1)


def dequantize(weight: StoredMatrix, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the weights (N, K): in float32, as the format defines them; or in float16, rounded from float32.

    Raises:
        ValueError: `dtype` is neither float32 nor float16.
    """
    if dtype not in (mx.float16, mx.float32):
        raise ValueError(f"dequantize: expected float16 or float32, found {dtype}")
    N, K = weight.shape
    threads, group = grid(N * K)
    (y,) = launch(
        KERNEL,
        weight.inputs,
        template=(("W", weight.layout.code), ("COUNT", N * K // 16)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(N, K)],
        output_dtypes=[dtype],
    )
    return y


# The old name, from when Q8_0 was the only type.
dequantize_q8_0 = dequantize


def reference(weight: StoredMatrix, dtype: mx.Dtype = mx.float32) -> Expected:
    """Return the expected result; the kernel's result must be bit-identical."""
    weights = expanded(weight).astype(np.float16 if dtype == mx.float16 else np.float32)
    return Expected(weights.astype(np.float64), np.zeros(weight.shape))
