"""Quantise and dequantise Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1.

In a block, 32 weights share a float16 scale `d` and, in the types that end in `_1`, a float16 minimum `m`.

- Q8_0: signed bytes, `weight = d * q`.
- Q4_0: 4 bits, `weight = d * (q - 8)`. Byte `i` has quant `i` in its low half, quant `i + 16` in its high half.
- Q4_1: 4 bits in the same order, `weight = d * q + m`.
- Q5_0: 5 bits, `weight = d * (q - 16)`. The low four bits of the quants are stored as in Q4_0; bit `i` of the 32 bits
  `qh` is the fifth bit of quant `i`.
- Q5_1: 5 bits in the same order, `weight = d * q + m`.

Q5_0 and Q5_1 have smaller errors here than in ggml, because several scales are tried (`scale_search.py`). For these
two types, a weight that is NaN or infinite raises ValueError.

Source: `quantize_row_*_ref` and `dequantize_row_*`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import (
    bit_fields,
    block_maximum,
    block_minimum,
    clear_unless_finite,
    float_scales,
    inverse,
    pack_fifths,
    pack_halves,
    round_half_away,
)
from mlx_engine.quant.scale_search import affine_groups, symmetric_groups


def dequantize_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 34) bytes to (n, 32) weights, `d * q`."""
    block = blocks.view(layout.Q8_0)[:, 0]
    weights: NDArray[np.float32] = block["qs"].astype(np.float32)
    with np.errstate(invalid="ignore"):  # NumPy would warn of infinity * 0, and of a scale that is a signalling NaN
        weights *= block["d"].astype(np.float32)[:, None]
    return weights


def quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 34) bytes. The weight of largest magnitude in a block gets the quant 127 or -127.

    Quants are computed with the float32 scale, which is then rounded to float16, as in ggml. If the float32 scale is
    infinite or NaN, the quants are 0. If only the float16 scale is infinite, the quants stay as computed.
    """
    blocks = np.empty(len(values), layout.Q8_0)
    # If a magnitude is above 127 * 65,504, the scale overflows float16. If a weight is infinite, infinity * 0 is NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        scale = block_maximum(np.abs(values)) / np.float32(127)
        factor = inverse(scale)
        quants = round_half_away(values * factor)
        clear_unless_finite(quants, factor)
        blocks["d"] = scale[:, 0]
    blocks["qs"] = quants.astype(np.int8)
    return blocks.view(np.uint8).reshape(len(values), -1)


def dequantize_q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 18) bytes to (n, 32) weights, `d * (q - 8)`."""
    block = blocks.view(layout.Q4_0)[:, 0]
    quants = bit_fields(block["qs"], 4).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return float_scales(block["d"], quants.astype(np.float32))


def quantize_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 18) bytes. The weight of largest magnitude gets the quant 0, which means -8 * d.

    So the scale d has the opposite sign of this weight. Weights with the sign of d are clipped at 7 * d.
    """
    blocks = np.empty(len(values), layout.Q4_0)
    # If a magnitude is above 8 * 65,504, the scale overflows float16. If a weight is infinite, infinity * 0 is NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        scale = _extreme(values) / np.float32(-8)
        factor = inverse(scale)
        quants = values * factor
        quants += np.float32(8.5)
        clear_unless_finite(quants, factor)
        np.minimum(quants, np.float32(15), out=quants)
        blocks["d"] = scale[:, 0]
    blocks["qs"] = pack_halves(quants.astype(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)


def _extreme(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (n, 1): the value of largest magnitude in each block; of values with equal magnitude, the first one."""
    high, low = block_maximum(values), block_minimum(values)
    extreme = np.where(high > -low, high, low)
    # `tied` are the blocks with NaN, and the blocks whose largest and smallest values have equal magnitudes.
    tied = np.flatnonzero(~((high > -low) | (high < -low)))
    rows = values[tied]
    extreme[tied] = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return extreme


def dequantize_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 20) bytes to (n, 32) weights, `d * q + m`."""
    block = blocks.view(layout.Q4_1)[:, 0]
    quants = bit_fields(block["qs"], 4).reshape(-1, 32).astype(np.float32)
    with np.errstate(invalid="ignore"):  # scale and minimum may be infinite or NaN
        return block["d"].astype(np.float32)[:, None] * quants + block["m"].astype(np.float32)[:, None]


def quantize_q4_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 20) bytes. The smallest weight of a block gets the quant 0, the largest 15."""
    blocks = np.empty(len(values), layout.Q4_1)
    # If high - low is above 15 * 65,504, the scale overflows float16. If a weight is infinite, infinity - infinity or
    # infinity * 0 is NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = block_minimum(values), block_maximum(values)
        scale = (high - low) / np.float32(15)
        factor = inverse(scale)
        quants = values - low
        quants *= factor
        quants += np.float32(0.5)
        clear_unless_finite(quants, factor)
        np.minimum(quants, np.float32(15), out=quants)
        blocks["d"], blocks["m"] = scale[:, 0], low[:, 0]
    blocks["qs"] = pack_halves(quants.astype(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)


def dequantize_q5_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 22) bytes to (n, 32) weights, `d * (q - 16)`."""
    block = blocks.view(layout.Q5_0)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.int8) - np.int8(16)
    return float_scales(block["d"], quants.astype(np.float32))


def quantize_q5_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 22) bytes."""
    d, quants = symmetric_groups(values, 16)
    blocks = np.empty(len(values), layout.Q5_0)
    blocks["d"] = d
    blocks["qs"], blocks["qh"] = pack_fifths((quants + np.int8(16)).view(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)


def dequantize_q5_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 24) bytes to (n, 32) weights, `d * q + m`."""
    block = blocks.view(layout.Q5_1)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # scale and minimum may be infinite or NaN
        return block["d"].astype(np.float32)[:, None] * quants + block["m"].astype(np.float32)[:, None]


def quantize_q5_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 24) bytes."""
    blocks = np.empty(len(values), layout.Q5_1)
    blocks["d"], blocks["m"], quants = affine_groups(values, 31)
    blocks["qs"], blocks["qh"] = pack_fifths(quants)
    return blocks.view(np.uint8).reshape(len(values), -1)
