"""MLX's affine types of four and eight bits in GPU memory: `weight = scale * q + bias`.

Quants are those of `mx.quantize`. Scale and bias of a group stand side by side; two bfloat16 are the halves of one
uint32, the scale in the low half, because not every GPU has the type.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import layout
from .layout import Layout, StoredMatrix

KINDS = {4: layout.AFFINE4, 8: layout.AFFINE8}
GROUPS = (32, 64, 128)
DTYPES = {"F16": mx.float16, "F32": mx.float32, "BF16": mx.uint32}


def _pairs(ws: mx.array) -> tuple[mx.array, mx.array]:
    pairs = ws.reshape(len(ws), -1, 2).astype(mx.float32)
    return pairs[..., 0], pairs[..., 1]


def _halves(ws: mx.array) -> tuple[mx.array, mx.array]:
    return (ws << 16).view(mx.float32), (ws & 0xFFFF0000).view(mx.float32)


@cache
def affine_layout(bits: int, group: int, scale: str) -> Layout:
    """Return the layout of the type with 4 or 8 bits, groups of 32, 64 or 128, and scales of F16, BF16 or F32."""
    if bits not in KINDS or group not in GROUPS or scale not in DTYPES:
        raise ValueError(
            f"affine_layout: expected 4 or 8 bits, a group of 32, 64 or 128, and scales of F16, BF16 or F32, "
            f"found {bits}, {group} and {scale}"
        )
    entry, read = (1, _halves) if scale == "BF16" else (2, _pairs)
    name = f"AFFINE{bits}_G{group}_{scale}"
    return Layout(name, KINDS[bits], group, bits, entry, DTYPES[scale], affine=read)


def join_affine(
    of: Layout, shape: tuple[int, int], quants: NDArray[np.uint8], scales: NDArray[np.uint8], biases: NDArray[np.uint8]
) -> StoredMatrix:
    """Return a matrix of the three tensors of an MLX folder, as bytes; no weight changes.

    Args:
        of: `affine_layout(...)`.
        shape: (N, K).
        quants: N * K * bits / 8 bytes, of any shape.
        scales: the bytes of N * K / group numbers.
        biases: as many.

    Raises:
        ValueError: the arrays are not those of such a matrix.
    """
    n, k = shape
    size = of.entry * of.dtype.size // 2
    expected = [n * k * of.bits // 8, *[n * k // of.group * size] * 2]
    found = [part.size for part in (quants, scales, biases)]
    if found != expected or k % of.group or n < 1 or k < 1:
        raise ValueError(
            f"join_affine: expected {expected} bytes of quants, scales and biases for {n} rows of {k} weights, "
            f"a multiple of {of.group}, found {found}"
        )
    pairs = np.stack([part.reshape(-1, size) for part in (scales, biases)], axis=1)
    dtype = {mx.float16: np.float16, mx.float32: np.float32, mx.uint32: np.uint32}[of.dtype]
    ws = np.ascontiguousarray(pairs).reshape(n, -1).view(dtype)
    return StoredMatrix(of, mx.array(np.ascontiguousarray(quants).reshape(n, -1).view(np.uint32)), mx.array(ws))
