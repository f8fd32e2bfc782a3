"""Q4_0: 32 weights share one float16 scale; each is 4 bits, counted from -8. `weight = d * (q - 8)`.

Byte `i` holds weight `i` in its low half and weight `i + 16` in its high half.

Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, block_maximum, block_minimum, clear_unless_finite, inverse, pack_halves


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """`d * (q - 8)`, (n, 18) bytes to (n, 32) weights."""
    block = blocks.view(layout.Q4_0)[:, 0]
    codes = bit_fields(block["qs"], 4).reshape(-1, 32).astype(np.int8) - np.int8(8)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a code 0
        return block["d"].astype(np.float32)[:, None] * codes.astype(np.float32)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The weight of largest magnitude becomes code 0, that is -8; (n, 32) weights to (n, 18) bytes.

    So the scale has the opposite sign of that weight, and the other end of the range, 8, is cut to 7.
    """
    blocks = np.empty(len(values), layout.Q4_0)
    with np.errstate(over="ignore", invalid="ignore"):  # magnitudes above 8 * 65,504, and infinities
        scale = _extreme(values) / np.float32(-8)
        factor = inverse(scale)
        codes = values * factor
        codes += np.float32(8.5)
        clear_unless_finite(codes, factor)
        np.minimum(codes, np.float32(15), out=codes)
        blocks["d"] = scale[:, 0]
    blocks["qs"] = pack_halves(codes.astype(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)


def _extreme(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 1): of each block the value of largest magnitude, of equal ones the first."""
    high, low = block_maximum(values), block_minimum(values)
    extreme = np.where(high > -low, high, low)
    # Equal magnitudes, or NaN.
    tied = np.flatnonzero(~((high > -low) | (high < -low)))
    rows = values[tied]
    extreme[tied] = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return extreme
