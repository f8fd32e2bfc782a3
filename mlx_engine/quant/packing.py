"""Functions shared by the block formats: rounding, inverse scales, bit fields, and two orders of 4-bit quants.

32 quants of 4 bits take 16 bytes. In MLX's order, called "in pairs", byte j has quants 2j and 2j + 1. In GGUF's order,
called "in halves", byte j has quants j and j + 16. In both orders, the first of the two quants is in the low bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `1 / scale`, or 0 for a scale of 0, so that a block of zeros gets quants of 0.

    If the magnitude of a scale is at most 2**-128, its inverse overflows to infinity. The functions of `legacy.py` then
    set the quants to 0 by `clear_unless_finite`, which is correct: such a small scale is 0 in float16.
    """
    with np.errstate(over="ignore"):
        return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def round_half_away(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return floats whose integer parts are `x` rounded like C's `roundf`, halves away from zero, for |x| < 2**22.

    The largest float below 0.5 is added to the magnitude, because adding 0.5 would round 0.49999997 to 1. If `x` is
    halfway between two integers, the float sum is rounded to the integer of larger magnitude.
    """
    away = np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), x)
    away += x
    return away


def clear_unless_finite(x: NDArray[np.float32], factor: NDArray[np.float32]) -> None:
    """Set NaN and infinities in `x` to 0, because their conversion to integers is undefined in C.

    `x` (n, 32) was computed from the weights times the factor (n, 1) of their block. The factor is the inverse of a
    scale, which is a fraction of the block's largest magnitude, or of the difference of its largest and smallest
    weight. So `x` can be NaN or infinite only in blocks whose factor is 0 or not finite, and only these are searched.
    """
    odd = np.flatnonzero(~np.isfinite(factor[:, 0]) | (factor[:, 0] == 0))
    if len(odd):
        rows = x[odd]
        x[odd] = np.where(np.isfinite(rows), rows, np.float32(0))


def block_maximum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (n, 1) maxima of (n, 32) values; NaN propagates. Twice as fast as `max(axis=1)`."""
    n, size = values.shape
    return np.maximum.reduceat(values.reshape(-1), np.arange(0, n * size, size))[:, None]


def block_minimum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (n, 1) minima of (n, 32) values; NaN propagates."""
    n, size = values.shape
    return np.minimum.reduceat(values.reshape(-1), np.arange(0, n * size, size))[:, None]


def bit_fields(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Split bytes into fields of `width` bits, lowest first: (n, ..., k) bytes to (n, ..., 8 / width, k) fields."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def scale_groups(scales: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply the values of n blocks by the scales (n, n_groups) of their groups; return (n, values of a block).

    `values` is (n, ...), and all groups have the same size.
    """
    # A scale that was read from a file may be infinite, NaN, or so large that a product overflows.
    with np.errstate(invalid="ignore", over="ignore"):
        weights: NDArray[np.float32] = scales[..., None] * values.reshape(*scales.shape, -1)
    return weights.reshape(len(scales), -1)


def float_scales(factor: NDArray[np.float16], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the factor (n,) of each block times the block's values (n, k), which are scales or quants."""
    with np.errstate(invalid="ignore"):  # the factor may be infinite or NaN, and a value 0
        return factor.astype(np.float32)[:, None] * values


def pack_halves(quants: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack (n, 32) 4-bit quants into (n, 16) bytes, with the first 16 quants in the low halves of the bytes."""
    return quants[:, :16] | quants[:, 16:] << np.uint8(4)


def pack_fifths(quants: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack (n, 32) 5-bit quants: return (n, 16) bytes of low bits, in halves, and (n, 4) bytes of fifth bits."""
    return pack_halves(quants & np.uint8(15)), np.packbits(quants >> np.uint8(4), axis=1, bitorder="little")


_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_FOUR = np.uint64(4)


def in_halves(pairs: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Reorder 4-bit quants, (n, 16 m) bytes, from pairs to halves, into `out` of the same shape."""
    words = np.ascontiguousarray(pairs).view(np.uint64)
    first, second = words[:, ::2], words[:, 1::2]
    # Of every 16 bytes in pairs, byte j of the first 8 has quants 2j and 2j + 1, and byte j of the last 8 has quants
    # 2j + 16 and 2j + 17. In halves, byte 2j (`even`) has quants 2j and 2j + 16, and byte 2j + 1 (`odd`) has quants
    # 2j + 1 and 2j + 17.
    even, odd = first & _LOW | (second & _LOW) << _FOUR, first >> _FOUR & _LOW | second & _HIGH
    out[:, ::2], out[:, 1::2] = even.view(np.uint8), odd.view(np.uint8)


def in_pairs(halves: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Reorder 4-bit quants, (n, 16 m) bytes, from halves to pairs, into `out` of the same shape."""
    even, odd = (np.ascontiguousarray(halves[:, i::2]).view(np.uint64) for i in (0, 1))
    words = out.view(np.uint64)
    words[:, ::2], words[:, 1::2] = even & _LOW | (odd & _LOW) << _FOUR, even >> _FOUR & _LOW | odd & _HIGH


def unpack_halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack (n, 16 m) bytes in halves to quants (n, 32 m), each from 0 to 15."""
    return bit_fields(packed.reshape(len(packed), -1, 16), 4).reshape(len(packed), -1)
