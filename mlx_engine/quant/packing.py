"""What the block formats share: rounding, inverses of scales, and taking bit fields apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """`1 / scale`, and 0 for a scale of 0 (a block of zeros has codes of 0).

    The inverse of a subnormal scale overflows to infinity; `finite_or_zero` then clears the codes, which is
    right, since the scale itself is 0 in float16.
    """
    with np.errstate(over="ignore"):
        return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def round_half_away(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest integer, halves away from zero, as C's `roundf` does (`np.round`: to even).

    Adding one half first would round 0.49999997 up; the distance to the floor is exact in float32.
    """
    size = np.abs(x)
    whole = np.floor(size)
    whole += (size - whole) >= np.float32(0.5)
    return np.copysign(whole, x)


def finite_or_zero(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x`, with 0 for NaN and infinities: their conversion to integers, open in C, gives 0 on x86."""
    return np.where(np.isfinite(x), x, np.float32(0))


def bit_fields(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Fields of `width` bits, lowest first: (n, ..., k) bytes to (n, ..., 8 / width, k) fields.

    Field `j` of all `k` bytes comes before field `j + 1` of any: the weights of one bit position are
    neighbours.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def pack_halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo 4-bit fields: (n, 32) codes below 16 to (n, 16) bytes, the first 16 in the low halves."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)
