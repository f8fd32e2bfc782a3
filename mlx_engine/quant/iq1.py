"""IQ1_S and IQ1_M: 256 weights in groups of 8, each the index of a point with coordinates -1, 0 and 1.

`weight = d * (2 * scale + 1) * (coordinate + delta)`, where delta is 1/8 or -1/8. The index has 11 bits. IQ1_S stores
its high 3 bits in `qh`, a 16-bit word per 32 weights that also has their scale (bits 12 to 14) and the sign of their
delta (bit 15). IQ1_M stores the high bits in half a byte per 8 weights, whose highest bit is the sign of their delta,
and a 3-bit scale per 16 weights; the high 4 bits of its four scale words are the bits of `d`.

Source: `dequantize_row_iq1_s` and `dequantize_row_iq1_m`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.grids import grid
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups

_DELTA = np.float32(0.125)


def dequantize_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 50) bytes of IQ1_S to (n, 256) weights."""
    block = blocks.view(layout.IQ1_S)[:, 0]
    high = block["qh"][..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)
    scales = 2 * (block["qh"] >> np.uint16(12) & np.uint16(7)).astype(np.float32) + 1
    deltas = np.where(block["qh"] >> np.uint16(15), -_DELTA, _DELTA)
    points = grid("IQ1")[block["qs"] | high.reshape(-1, 32) << np.uint16(8)].reshape(-1, 8, 32)
    return scale_groups(float_scales(block["d"], scales), points + deltas[..., None])


def dequantize_m(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 56) bytes of IQ1_M to (n, 256) weights."""
    block = blocks.view(layout.IQ1_M)[:, 0]
    nibbles = bit_fields(block["qh"][..., None], 4).reshape(-1, 32)
    deltas = np.where(nibbles >> np.uint8(3), -_DELTA, _DELTA)
    points = grid("IQ1")[block["qs"] | (nibbles & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    words = block["scales"]
    scales = 2 * (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)).astype(np.float32) + 1
    parts = words >> np.uint16(12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    factor = np.bitwise_or.reduce(parts, axis=1).view(np.float16)
    return scale_groups(float_scales(factor, scales.reshape(-1, 16)), points + deltas[..., None])
