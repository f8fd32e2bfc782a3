"""F32, F16 and BF16: unquantised formats, one little-endian float per weight.

F32 and F16 are IEEE single and half precision. BF16 is the upper half of a float32. Reading is exact; writing F16 and
BF16 rounds to nearest even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dequantize_f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read (n, 4) bytes as (n, 1) values."""
    return blocks.view("<f4")


def quantize_f32(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Write (n, 1) values as (n, 4) bytes."""
    return values.view(np.uint8)


def dequantize_f16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read (n, 2) bytes as (n, 1) values."""
    with np.errstate(invalid="ignore"):  # widening a signalling NaN is an invalid operation
        return blocks.view("<f2").astype(np.float32)


def quantize_f16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round (n, 1) values to (n, 2) bytes. Magnitudes that round to more than 65,504 become infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype("<f2").view(np.uint8)


def dequantize_bf16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read (n, 2) bytes as (n, 1) values."""
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize_bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round (n, 1) values to (n, 2) bytes. A NaN becomes a quiet NaN: rounding could give infinity or zero."""
    bits = values.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits | np.uint32(0x00400000)) >> np.uint32(16)
    # The sum fits into 32 bits for finite values and infinities. For NaN the sum may overflow, but is not used.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan, quiet, rounded).astype("<u2").view(np.uint8)
