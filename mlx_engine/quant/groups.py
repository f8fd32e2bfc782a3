"""Dequantise MLX's quantised types in NumPy, bit for bit as `mx.dequantize` does on the CPU in float32.

Mode "affine": `scale * q + bias`, with scale and bias widened to float32, the product and the sum each rounded. With
scales of float16 or bfloat16 the product is exact. (Given scales of these types, `mx.dequantize` itself computes in
them, which is less exact; `mx.quantized_matmul` with float32 activations widens them.) The other modes have quants that
are floats: E2M1 of 4 bits or E4M3 of 8 bits. Their scale is a power of two, E8M0, or in "nvfp4" an E4M3.

Source: "OCP Microscaling Formats (MX) Specification", version 1.0, for E2M1, E4M3 and E8M0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant import nibbles
from mlx_engine.quant.floats import BF16
from mlx_engine.quant.group_types import GroupType


def dequantize(type_: GroupType, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, block bytes) to (n, group size) weights."""
    block = blocks.view(type_.layout)[:, 0]
    quants = nibbles.unpack_halves(block["qs"]) if type_.in_halves else unpack(block["qs"], type_.bits)
    with np.errstate(invalid="ignore", over="ignore"):  # any bytes are weights: a scale may be infinite or NaN
        if type_.has_biases:
            weights = quants.astype(np.float32)
            weights *= _widened(block["d"], type_)[:, None]
            weights += _widened(block["m"], type_)[:, None]
            return weights
        values, scales = (E2M1 if type_.bits == 4 else E4M3), (E4M3 if type_.mode == "nvfp4" else E8M0)
        weights = values[quants]
        weights *= scales[block["d"]][:, None]
        return weights


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return quants (n, group size), each from 0 to 2**bits - 1, of (n, group size * bits / 8) bytes in MLX's order.

    `bits` bytes hold 8 quants. A quant lies in one byte or in two adjacent ones.
    """
    if bits == 8:
        return packed
    eights = packed.reshape(len(packed), -1, bits)
    quants = np.empty((*eights.shape[:2], 8), dtype=np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        some = eights[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            some = some | eights[..., byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(some, np.uint8((1 << bits) - 1), out=quants[..., i])
    return quants.reshape(len(packed), -1)


def _widened(values: NDArray[np.generic], type_: GroupType) -> NDArray[np.float32]:
    if type_.scale != "BF16":
        return values.astype(np.float32)
    return BF16.dequantize(np.ascontiguousarray(values).view(np.uint8))


def _e4m3() -> NDArray[np.float32]:
    """Return the 256 values of E4M3: 4 bits of exponent, 3 of mantissa, no infinities, NaN for all ones."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.float32) / np.float32(2)
# The values of the 4-bit quants, of the 8-bit quants, and of the scales that are powers of two. The largest scale is
# NaN in the specification and an infinity in MLX.
E2M1 = np.concatenate((_HALVES, -_HALVES))
E4M3 = _e4m3()
E8M0 = np.concatenate((np.ldexp(np.float32(1), np.arange(-127, 128)), [np.inf])).astype(np.float32)
