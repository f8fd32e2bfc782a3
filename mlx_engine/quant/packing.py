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
    """`x` so that cutting off its fraction rounds it, halves away from zero, as C's `roundf` does; for |x| < 2**22.

    Adding one half would round 0.49999997 up. With the float below one half the sum of that stays below 1, and the
    sum of any half is rounded up to the next integer.
    """
    away = np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), x)
    away += x
    return away


def clear_unless_finite(x: NDArray[np.float32], factor: NDArray[np.float32]) -> None:
    """0 for NaN and infinities in `x`, (n, 32) products with `factor`, (n, 1): C leaves open what integers they become.

    Only a factor that is no finite number, or that is 0, can have made them: of a block of zeros, of infinities, of
    tiny values. Others are not looked through.
    """
    odd = np.flatnonzero(~np.isfinite(factor[:, 0]) | (factor[:, 0] == 0))
    if len(odd):
        rows = x[odd]
        x[odd] = np.where(np.isfinite(rows), rows, np.float32(0))


def block_maximum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 1): the largest of each of (n, 32) values, or NaN if there is one; twice as fast as `max(axis=1)`."""
    n, size = values.shape
    return np.maximum.reduceat(values.reshape(-1), np.arange(0, n * size, size))[:, None]


def block_minimum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 1): the smallest of each of (n, 32) values, or NaN if there is one."""
    n, size = values.shape
    return np.minimum.reduceat(values.reshape(-1), np.arange(0, n * size, size))[:, None]


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
