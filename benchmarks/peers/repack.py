"""Q8_0 blocks in the layout of MLX's 8-bit format, without rounding.

MLX stores quants from 0 to 255, four to a 32-bit word, and for every group of 32 a scale and a bias: a weight is
`scale * quant + bias`. A Q8_0 block is such a group: its quants are shifted by 128, and the bias shifts them back.
"""

from __future__ import annotations

import numpy as np

from kernels import blocks
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

GROUP, BITS = 32, 8


def repacked(name: str, weight: Weight) -> dict[str, np.ndarray]:
    """Return MLX's arrays for a tensor, by name; a tensor that is not Q8_0 becomes float32."""
    if weight.type != Q8_0:
        return {name: weight.dequantize()}
    stored = weight.data.view(blocks.Q8_0).reshape(weight.shape[0], -1)
    codes = np.ascontiguousarray(stored["qs"]).view(np.uint8) ^ 0x80
    scales = stored["d"].astype(np.float32)
    stem = name.removesuffix("weight")
    return {
        name: codes.reshape(len(stored), -1).view("<u4"),
        stem + "scales": scales,
        # 128 is a power of two: exact.
        stem + "biases": -128 * scales,
    }
