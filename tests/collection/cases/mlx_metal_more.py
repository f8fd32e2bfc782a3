"""More of MLX's own .metal files: a dot product, blocks of four-bit floats, the input of a convolution."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case
from tests.collection.cases.mlx_metal import MLX, normal, out, run


@case(MLX)
def metal_dot(checkout: Checkout) -> Results:
    a, b = normal(2001), normal(2001, seed=1)
    found = run(
        checkout, "dot", "dot_product_float32_it32_tg512_sg16", [a, b, out(1), 2001],
        grid=(512, 1, 1), threadgroup=(512, 1, 1),
    )  # fmt: skip
    return found, [np.array([a.astype(np.float64) @ b])]


def four_bits(rows: int, columns: int) -> tuple[list[mx.array], mx.array]:
    """Return a matrix in blocks of MXFP4, and what it means."""
    stored = mx.quantize(mx.array(normal(rows, columns)), group_size=32, bits=4, mode="mxfp4")
    return list(stored), mx.dequantize(*stored, group_size=32, bits=4, mode="mxfp4")


@case(MLX)
def metal_fp_dequantize(checkout: Checkout) -> Results:
    (quants, scales), values = four_bits(6, 128)
    buffers = [np.array(quants).view(np.uint8), scales, None, out(6, 128)]
    name = "mxfp4_dequantize_float_gs_32_b_4_hgs_false"
    found = run(checkout, "fp_quantized", name, buffers, grid=(64, 6, 1), threadgroup=(32, 2, 1))
    return found, [values.astype(mx.float32)]


@case(MLX)
def metal_fp_quantized_qmv(checkout: Checkout) -> Results:
    rows, columns = 16, 512
    (quants, scales), values = four_bits(rows, columns)
    x = normal(columns, seed=1)
    buffers = dict(enumerate([quants, scales, None, x, out(rows), columns, rows, 0, None, None, 0, None, None, None]))
    name = "mxfp4_qmv_fast_float_gs_32_b_4_batch_0"
    grid = {"grid": (32, 2 * rows // 8, 1), "threadgroup": (32, 2, 1)}
    return run(checkout, "fp_quantized", name, buffers, **grid), [np.array(values.astype(mx.float32)) @ x]


CONVOLUTION = np.dtype(
    [(name, "i4") for name in ("N", "C", "O")]
    + [(name, "i4", 2) for name in ("iS", "wS", "oS", "str", "pad", "kdil", "idil")]
    + [(f"{name}_strides", "i8", 4) for name in ("in", "wt", "out")]
    + [("groups", "i4"), ("flip", "?")],
    align=True,
)


@case(MLX)
def metal_convolution_unfold(checkout: Checkout) -> Results:
    n, height, width, channels = 2, 5, 6, 4
    x = normal(n, height, width, channels)
    params = np.zeros((), CONVOLUTION)
    one = (1, 1)
    for name, value in (("N", n), ("C", channels), ("O", 1), ("iS", (height, width)), ("wS", (3, 3)), ("groups", 1)):
        params[name] = value
    for name, value in (("oS", (height, width)), ("str", one), ("pad", one), ("kdil", one), ("idil", one)):
        params[name] = value
    params["in_strides"] = [height * width * channels, width * channels, channels, 1]
    pixels = n * height * width
    found = run(
        checkout, "conv", "naive_unfold_nd_float32_2", [x, out(pixels, 9, channels), params, 0],
        grid=(channels, 9, pixels), threadgroup=(channels, 9, 4),
    )  # fmt: skip
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    parts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return found, [np.stack(parts, axis=3).reshape(pixels, 9, channels)]
