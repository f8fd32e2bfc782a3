"""Q2_K: 256 weights in 16 groups of 16; a weight is 2 bits, a group has a 4-bit scale and a 4-bit minimum.

`weight = (d * scale) * q - (dmin * minimum)`. A byte of `scales` holds a group's scale in its low half and
its minimum in the high one. Each 32 bytes of `qs` hold 128 weights: the lowest two bits of each byte are the first
32 weights, the next two bits the next 32, and so on.

Source: `dequantize_row_q2_K`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 84) bytes to (n, 256) weights."""
    block = blocks.view(layout.Q2_K)[:, 0]
    quants = bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).astype(np.float32)
    parts = bit_fields(block["scales"], 4).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: d and dmin may be infinite or NaN
        scales = block["d"].astype(np.float32)[:, None] * parts[:, 0]
        minima = block["dmin"].astype(np.float32)[:, None] * parts[:, 1]
        return (scales[..., None] * quants - minima[..., None]).reshape(-1, 256)
