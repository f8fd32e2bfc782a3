"""Q3_K: 256 weights in 16 groups of 16; a weight is 3 bits with an offset of 4, a group has a 6-bit scale.

`weight = d * (scale - 32) * (q - 4)`. Each 32 bytes of `qs` hold the low two bits of 128 weights, the first
32 in the lowest bits. Bit `j` of the 32 bytes `hmask` is the third bit of weights `32 j` to `32 j + 31`. The
first 8 bytes of `scales` hold the low four bits of 16 scales, the last 4 bytes the high two.

Source: `dequantize_row_q3_K`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 110) bytes to (n, 256) weights."""
    block = blocks.view(layout.Q3_K)[:, 0]
    low = bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    third = bit_fields(block["hmask"], 1).reshape(-1, 16, 16)
    quants = ((low | third << np.uint8(2)).astype(np.int8) - np.int8(4)).astype(np.float32)

    low_scales = bit_fields(block["scales"][:, :8], 4).reshape(-1, 16)
    high_scales = bit_fields(block["scales"][:, 8:], 2).reshape(-1, 16)
    scales = ((low_scales | high_scales << np.uint8(4)).astype(np.int8) - np.int8(32)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: d may be infinite or NaN, and a scale 0
        return ((block["d"].astype(np.float32)[:, None] * scales)[..., None] * quants).reshape(-1, 256)
