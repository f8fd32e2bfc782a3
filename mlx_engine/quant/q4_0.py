"""Q4_0: 32 weights share one float16 scale; each is 4 bits with an offset of 8. `weight = d * (q - 8)`.

Byte `i` holds weight `i` in its low half and weight `i + 16` in its high half.

Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, block_maximum, block_minimum, clear_unless_finite, inverse, pack_halves


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 18) bytes to (n, 32) weights, `d * (q - 8)`."""
    block = blocks.view(layout.Q4_0)[:, 0]
    quants = bit_fields(block["qs"], 4).reshape(-1, 32).astype(np.int8) - np.int8(8)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a quant 0
        return block["d"].astype(np.float32)[:, None] * quants.astype(np.float32)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 18) bytes: the weight of largest magnitude becomes quant 0, that is -8 * d.

    The scale therefore has the opposite sign of that weight, and values at the other end, 8 * d, are clipped to 7 * d.
    """
    blocks = np.empty(len(values), layout.Q4_0)
    with np.errstate(over="ignore", invalid="ignore"):  # magnitudes above 8 * 65,504, and infinities
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
    """Return (n, 1): the value of largest magnitude in each block, the first one of equal magnitudes."""
    high, low = block_maximum(values), block_minimum(values)
    extreme = np.where(high > -low, high, low)
    # Equal magnitudes, or NaN.
    tied = np.flatnonzero(~((high > -low) | (high < -low)))
    rows = values[tied]
    extreme[tied] = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return extreme
