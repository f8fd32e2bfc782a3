"""Repack quantised matrices of files for GPU memory, without changing a weight: one function and layout per format."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from . import layout
from .layout import BLOCK, Layout, StoredMatrix, blocks_of, packed, unwritten

# ---- Q8_0 ----

# Q8_0 in GPU memory: bytes with their sign bit flipped, and float16 scales.
#
# With the sign bit flipped (`q ^ 0x80`), quants are unsigned: 0 to 255 for -128 to 127. So the two arrays are also the
# quants and scales of MLX's affine format, with the biases `-128 * d`: `d * (q + 128) - 128 * d` is exactly `d * q`.
# Our kernels flip four sign bits back with one operation.

# The largest scale d whose bias, -128 d, does not overflow in float16.
LARGEST_AFFINE_SCALE = 511.75


def _with_offset(offset: int, ws: mx.array) -> tuple[mx.array, mx.array]:
    """Return the scales `d` and the biases `-offset * d`, in float32, because a bias could overflow in float16."""
    scales = ws.astype(mx.float32)
    return scales, -offset * scales


_AFFINE_Q8_0, _AFFINE_Q4_0 = partial(_with_offset, 128), partial(_with_offset, 8)
LAYOUT_Q8_0 = Layout("Q8_0", layout.Q8_0, group=BLOCK, bits=8, entry=1, dtype=mx.float16, affine=_AFFINE_Q8_0)


class Q8_0Matrix(StoredMatrix):  # noqa: N801 - the format's name
    """A Q8_0 matrix (N, K): `weight[n, k] = ws[n, k // 32] * quant[n, k]`.

    Attributes:
        wq: uint32 (N, K / 4); byte k % 4 of element (n, k // 4), counted from the lowest, is `quant[n, k] ^ 0x80`.
        ws: float16 (N, K / 32), scales.
    """

    def __init__(self, wq: mx.array, ws: mx.array) -> None:
        super().__init__(LAYOUT_Q8_0, wq, ws)

    def biases(self) -> mx.array:
        """Return `-128 * ws`, float16 (N, K / 32): the biases for `mx.quantized_matmul`.

        Raises:
            ValueError: a scale is so large that its bias overflows in float16.
        """
        largest = float(np.abs(np.array(self.ws)).max())
        if not largest <= LARGEST_AFFINE_SCALE:
            raise ValueError(f"biases: expected scales up to {LARGEST_AFFINE_SCALE}, found {largest}")
        return self.ws * mx.array(-128, dtype=mx.float16)


def split_q8_0(raw: NDArray[np.uint8], shape: tuple[int, int]) -> Q8_0Matrix:
    """Repack the Q8_0 blocks of a file, N * K / 32 * 34 bytes in row order, as a matrix of `shape` (N, K).

    `raw` has any shape, and may be a read-only view of a mapped file.

    Raises:
        ValueError: `raw` has another number of bytes, or K is not a multiple of the block size.
    """
    found = blocks_of("split_q8_0", raw, shape, blocks.Q8_0, BLOCK)
    quants = found["qs"].view(np.uint8)
    wq = unwritten((shape[0], shape[1] // 4), np.uint32)
    np.bitwise_xor(quants, np.uint8(0x80), out=np.asarray(wq).view(np.uint8).reshape(quants.shape))
    # Copy the scales: for a view, MLX would keep all of `found` in memory, including the quants.
    scales = np.ascontiguousarray(found["d"])
    return Q8_0Matrix(wq, mx.array(scales))


def joined(matrix: Q8_0Matrix) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return the quants (N, K) and scales (N, K / 32) of a matrix as NumPy arrays, for tests."""
    quants = np.array(matrix.wq).view(np.uint8) ^ np.uint8(0x80)
    return quants.view(np.int8), np.array(matrix.ws)


# ---- Q4_0 ----

# Q4_0 in GPU memory: quants of four bits, and float16 scales. `weight = d * (q - 8)`.
LAYOUT_Q4_0 = Layout("Q4_0", layout.Q4_0, group=BLOCK, bits=4, entry=1, dtype=mx.float16, affine=_AFFINE_Q4_0)


def split_q4_0(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q4_0 blocks of a file, N * K / 32 * 18 bytes; arguments and errors are those of `split_q8_0`."""
    found = blocks_of("split_q4_0", raw, shape, blocks.Q4_0, BLOCK)
    # The low four bits of 16 bytes hold 16 quants, and the high four bits the next 16.
    quants = np.concatenate([found["qs"] & np.uint8(15), found["qs"] >> np.uint8(4)], axis=-1)
    scales = np.ascontiguousarray(found["d"])
    return StoredMatrix(LAYOUT_Q4_0, mx.array(packed(quants.reshape(shape), 4)), mx.array(scales))


# ---- Q4_K ----

# Q4_K in GPU memory: `wq` has quants of four bits. `ws` has WORDS uint32 per 256 weights: the first 16 bytes of the
# file's block, with d, dmin, and the packed scales and minima.
#
# `weight = (d * scale) * q - dmin * minimum`. 256 weights share d and dmin (float16); 32 weights share a scale and a
# minimum of six bits each.

SUPERBLOCK, WORDS = 256, 4


def _affine_q4_k(ws: mx.array) -> tuple[mx.array, mx.array]:
    """Return the exact scales and biases, each float32 (N, K / 32)."""
    words = ws.reshape(len(ws), -1, WORDS)
    factors = mx.contiguous(words[..., :1]).view(mx.float16).astype(mx.float32)
    packed_scales = mx.contiguous(words[..., 1:]).view(mx.uint8)
    first, second, last = (packed_scales[..., i : i + 4] for i in (0, 4, 8))
    scales = mx.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    minima = mx.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    return tuple(  # type: ignore[return-value]
        (factors[..., i : i + 1] * sign * part.astype(mx.float32)).reshape(len(ws), -1)
        for i, sign, part in ((0, 1, scales), (1, -1, minima))
    )


LAYOUT_Q4_K = Layout("Q4_K", layout.Q4_K, group=SUPERBLOCK, bits=4, entry=WORDS, dtype=mx.uint32, affine=_affine_q4_k)


def split_q4_k(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q4_K blocks of a file, N * K / 256 * 144 bytes; arguments and errors are those of `split_q8_0`."""
    found = blocks_of("split_q4_k", raw, shape, blocks.Q4_K, SUPERBLOCK)
    # The low four bits of 32 bytes hold 32 quants, and the high four bits the next 32.
    qs = found["qs"].reshape(*found.shape, 4, 1, 32)
    quants = np.concatenate([qs & np.uint8(15), qs >> np.uint8(4)], axis=-2)
    heads = np.ascontiguousarray(found).view(np.uint8).reshape(*found.shape, -1)[..., : 4 * WORDS]
    scales = np.ascontiguousarray(heads).view(np.uint32).reshape(shape[0], -1)
    return StoredMatrix(LAYOUT_Q4_K, mx.array(packed(quants.reshape(shape), 4)), mx.array(scales))


# ---- Q6_K ----

# Q6_K in GPU memory: quants of six bits; and per 256 weights, a float16 d and 16 scales of one signed byte.
#
# `weight = (d * scale) * (q - 32)`; 16 weights share a scale. The quants of 16 weights take three uint32: two with the
# low four bits, one with the high two. In `ws`, d and its 16 scales take the space of HALVES float16.
#
# MLX's affine format has no groups of 16. So if a GPU refuses our kernels, `_values_q6_k` expands the matrix to floats.

HALVES = 9


def _values_q6_k(wq: mx.array, ws: mx.array) -> mx.array:
    n = len(wq)
    words = wq.reshape(n, -1, 3)
    low = (words[..., :2, None] >> (4 * mx.arange(8, dtype=mx.uint32))) & 15
    high = (words[..., 2:] >> (2 * mx.arange(16, dtype=mx.uint32))) & 3
    quants = (low.reshape(high.shape) | high << 4).astype(mx.float32) - 32
    entries = ws.reshape(n, -1, HALVES)
    bytes_ = mx.contiguous(entries[..., 1:]).view(mx.int8)
    scales = entries[..., :1].astype(mx.float32) * bytes_.astype(mx.float32)
    return (scales.reshape(n, -1, 1) * quants).reshape(n, -1)


LAYOUT_Q6_K = Layout("Q6_K", layout.Q6_K, group=SUPERBLOCK, bits=6, entry=HALVES, dtype=mx.float16, values=_values_q6_k)


def split_q6_k(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q6_K blocks of a file, N * K / 256 * 210 bytes; arguments and errors are those of `split_q8_0`."""
    found = blocks_of("split_q6_k", raw, shape, blocks.Q6_K, SUPERBLOCK)
    # In each half of a block, 64 bytes of `ql` hold the low four bits of 128 quants: quants 0 to 63 in the low four
    # bits of the bytes, quants 64 to 127 in the high four bits. 32 bytes of `qh` hold the high two bits: those of
    # quants 0 to 31 in the lowest two bits of the bytes, those of quants 32 to 63 in the next two, and so on.
    ql, qh = found["ql"].reshape(*found.shape, 2, 1, 64), found["qh"].reshape(*found.shape, 2, 1, 32)
    low = np.concatenate([ql & np.uint8(15), ql >> np.uint8(4)], axis=-2)
    high = np.concatenate([qh >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-2)
    words = [packed(part.reshape(shape[0], -1, 16), bits) for part, bits in ((low, 4), (high, 2))]
    scales = np.concatenate([found["d"][..., None], found["scales"].view(np.float16)], axis=-1)
    quants = np.concatenate(words, axis=-1).reshape(shape[0], -1)
    return StoredMatrix(LAYOUT_Q6_K, mx.array(quants), mx.array(scales.reshape(shape[0], -1)))


# ---- MLX's affine types ----

# MLX's affine types of four and eight bits in GPU memory: `weight = scale * q + bias`.
#
# Quants are stored as `mx.quantize` stores them. The scale and the bias of a group are adjacent. If both are bfloat16,
# they are stored as one uint32, the scale in the low half, because not every GPU supports bfloat16.

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
    """Return the layout of MLX's type with 4 or 8 bits, groups of 32, 64 or 128, and scales of F16, BF16 or F32."""
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
    """Return a matrix of layout `of` and shape (N, K) from the bytes of its three tensors in an MLX folder.

    `quants` has N * K * bits / 8 bytes; `scales` and `biases` have the bytes of N * K / group numbers each.

    Raises:
        ValueError: an array has another number of bytes, or K is not a multiple of the group size.
    """
    n, k = shape
    size = of.entry * of.dtype.size // 2
    expected = [n * k * of.bits // 8, *[n * k // of.group * size] * 2]
    found = [part.size for part in (quants, scales, biases)]
    if found != expected or k % of.group or n < 1 or k < 1:
        raise ValueError(
            f"join_affine: expected {expected} bytes of quants, scales and biases for {n} rows of {k} weights, "
            f"found {found}; {k} must be a multiple of {of.group}"
        )
    pairs = np.stack([part.reshape(-1, size) for part in (scales, biases)], axis=1)
    dtype = {mx.float16: np.float16, mx.float32: np.float32, mx.uint32: np.uint32}[of.dtype]
    ws = np.ascontiguousarray(pairs).reshape(n, -1).view(dtype)
    return StoredMatrix(of, mx.array(np.ascontiguousarray(quants).reshape(n, -1).view(np.uint32)), mx.array(ws))
