"""Q4_1: 32 weights share a float16 scale and a float16 minimum; each is 4 bits. `weight = d * q + m`.

Byte `i` holds weight `i` in its low half and weight `i + 16` in its high half.

Source: `quantize_row_q4_1_ref` and `dequantize_row_q4_1`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, block_maximum, block_minimum, clear_unless_finite, inverse, pack_halves


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 20) bytes to (n, 32) weights, `d * q + m`."""
    block = blocks.view(layout.Q4_1)[:, 0]
    quants = bit_fields(block["qs"], 4).reshape(-1, 32).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: scale and minimum may be infinite or NaN
        return block["d"].astype(np.float32)[:, None] * quants + block["m"].astype(np.float32)[:, None]


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 20) bytes: the smallest weight of a block becomes 0, the largest 15."""
    blocks = np.empty(len(values), layout.Q4_1)
    with np.errstate(over="ignore", invalid="ignore"):  # ranges above 15 * 65,504, and infinities
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
