"""F32, F16 and BF16: one float per weight, nothing shared between weights.

BF16 is the upper half of a float32. Reading any of them is exact; writing F16 and BF16 rounds to nearest
even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class F32:
    """IEEE single precision, little-endian."""

    @staticmethod
    def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The stored floats, (n, 4) bytes to (n, 1) values."""
        return blocks.view("<f4")

    @staticmethod
    def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The bytes of the floats, (n, 1) values to (n, 4) bytes."""
        return values.view(np.uint8)


class F16:
    """IEEE half precision, little-endian; what exceeds 65,504 is written as infinity."""

    @staticmethod
    def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The stored halves as floats, (n, 2) bytes to (n, 1) values."""
        with np.errstate(invalid="ignore"):  # widening a signalling NaN raises the flag; a NaN it stays
            return blocks.view("<f2").astype(np.float32)

    @staticmethod
    def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Round to halves, (n, 1) values to (n, 2) bytes."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinity is what the format has for large values
            return values.astype("<f2").view(np.uint8)


class BF16:
    """The upper 16 bits of an IEEE single."""

    @staticmethod
    def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The stored halves as floats, (n, 2) bytes to (n, 1) values."""
        return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)

    @staticmethod
    def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Round to nearest even, (n, 1) values to (n, 2) bytes.

        A NaN must not be rounded: carrying out of its mantissa would make an infinity. It is made quiet
        instead.
        """
        bits = values.view(np.uint32)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        quiet = (bits | np.uint32(0x00400000)) >> np.uint32(16)
        # Below infinity (0xFF800000 with its sign) the sum stays within 32 bits; a NaN's may wrap, and is
        # not used.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(is_nan, quiet, rounded).astype("<u2").view(np.uint8)
