"""Q5_0: 32 weights share one float16 scale; each is 5 bits with an offset of 16. `weight = d * (q - 16)`.

The low four bits are stored as in Q4_0; bit `i` of the 32 bits `qh` is the fifth bit of weight `i`.

Source: `dequantize_row_q5_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, block_extreme, clear_unless_finite, inverse, pack_fifths


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 22) bytes to (n, 32) weights, `d * (q - 16)`."""
    block = blocks.view(layout.Q5_0)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.int8) - np.int8(16)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a quant 0
        return block["d"].astype(np.float32)[:, None] * quants.astype(np.float32)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 22) bytes: the weight of largest magnitude becomes quant 0, that is -16 * d."""
    blocks = np.empty(len(values), layout.Q5_0)
    with np.errstate(over="ignore", invalid="ignore"):  # magnitudes above 16 * 65,504, and infinities
        scale = block_extreme(values) / np.float32(-16)
        factor = inverse(scale)
        quants = values * factor
        quants += np.float32(16.5)
        clear_unless_finite(quants, factor)
        np.minimum(quants, np.float32(31), out=quants)
        blocks["d"] = scale[:, 0]
    blocks["qs"], blocks["qh"] = pack_fifths(quants.astype(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)
