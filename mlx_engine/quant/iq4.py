"""IQ4_NL and IQ4_XS: a weight is 4 bits, the index of one of 16 levels, which lie denser around 0.

IQ4_NL: 32 weights share one float16 scale, `weight = d * level`; quants are stored as in Q4_0. IQ4_XS: 256 weights in 8
groups of 32, `weight = d * (scale - 32) * level`. A scale has 6 bits: the low four are in `scales_l`, the high two in
`scales_h`. Each 16 bytes of `qs` hold one group, the first 16 weights in the low halves.

Source: `dequantize_row_iq4_nl` and `dequantize_row_iq4_xs`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def dequantize_nl(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 18) bytes of IQ4_NL to (n, 32) weights."""
    block = blocks.view(layout.IQ4_NL)[:, 0]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        scales = block["d"].astype(np.float32)[:, None]
    return scale_groups(scales, LEVELS[bit_fields(block["qs"], 4)])


def dequantize_xs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 136) bytes of IQ4_XS to (n, 256) weights."""
    block = blocks.view(layout.IQ4_XS)[:, 0]
    low = bit_fields(block["scales_l"][..., None], 4).reshape(-1, 8)
    high = (block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    return scale_groups(float_scales(block["d"], scales), LEVELS[bit_fields(block["qs"].reshape(-1, 8, 16), 4)])
