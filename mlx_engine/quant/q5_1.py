"""Q5_1: 32 weights share a float16 scale and a float16 minimum; each is 5 bits. `weight = d * q + m`.

The low four bits are stored as in Q4_0; bit `i` of the 32 bits `qh` is the fifth bit of weight `i`.

Source: `dequantize_row_q5_1`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, block_maximum, block_minimum, clear_unless_finite, inverse, pack_fifths


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 24) bytes to (n, 32) weights, `d * q + m`."""
    block = blocks.view(layout.Q5_1)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: scale and minimum may be infinite or NaN
        return block["d"].astype(np.float32)[:, None] * quants + block["m"].astype(np.float32)[:, None]


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 24) bytes: the smallest weight of a block becomes 0, the largest 31."""
    blocks = np.empty(len(values), layout.Q5_1)
    with np.errstate(over="ignore", invalid="ignore"):  # ranges above 31 * 65,504, and infinities
        low, high = block_minimum(values), block_maximum(values)
        scale = (high - low) / np.float32(31)
        factor = inverse(scale)
        quants = values - low
        quants *= factor
        quants += np.float32(0.5)
        clear_unless_finite(quants, factor)
        np.minimum(quants, np.float32(31), out=quants)
        blocks["d"], blocks["m"] = scale[:, 0], low[:, 0]
    blocks["qs"], blocks["qh"] = pack_fifths(quants.astype(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)
