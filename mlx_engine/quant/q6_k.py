"""Q6_K: 256 weights in 16 groups of 16; a weight has 6 bits with an offset of 32, a group a signed 8-bit scale.

`weight = (d * scale) * (q - 32)`. For each half of the block, 64 bytes of `ql` hold the low four bits of
128 weights (the first 64 in the low halves), and 32 bytes of `qh` their high two bits (the first 32
lowest).

Source: `dequantize_row_q6_K`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields
from mlx_engine.quant.scale_search import symmetric


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 210) bytes to (n, 256) weights."""
    block = blocks.view(layout.Q6_K)[:, 0]
    low = bit_fields(block["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = bit_fields(block["qh"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    quants = ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: d may be infinite or NaN, and a scale 0
        scales = block["d"].astype(np.float32)[:, None] * block["scales"].astype(np.float32)
        return (scales[..., None] * quants).reshape(-1, 256)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 256) weights to (n, 210) bytes.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    found, blocks = symmetric(values), np.empty(len(values), layout.Q6_K)
    blocks["d"], blocks["scales"] = found.d, found.scales
    quants = (found.quants + np.int8(32)).view(np.uint8)
    low = (quants & np.uint8(15)).reshape(-1, 2, 2, 64)
    blocks["ql"] = (low[:, :, 0] | low[:, :, 1] << np.uint8(4)).reshape(-1, 128)
    high = (quants >> np.uint8(4)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks["qh"] = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    return blocks.view(np.uint8).reshape(len(values), -1)
