"""Q8_0: 32 weights share one float16 scale; each is a signed byte. `weight = d * q`, 8.5 bits per weight.

Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import block_maximum, clear_unless_finite, inverse, round_half_away


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 34) bytes to (n, 32) weights, `d * q`."""
    block = blocks.view(layout.Q8_0)[:, 0]
    weights: NDArray[np.float32] = block["qs"].astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a quant 0
        weights *= block["d"].astype(np.float32)[:, None]
    return weights


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 34) bytes: the largest magnitude of a block becomes 127 or -127.

    Quants are computed with the float32 scale, which is then rounded to float16, as in ggml. If the scale overflows
    or is NaN, the quants are 0.
    """
    blocks = np.empty(len(values), layout.Q8_0)
    with np.errstate(over="ignore", invalid="ignore"):  # magnitudes above 127 * 65,504, and infinities
        scale = block_maximum(np.abs(values)) / np.float32(127)
        factor = inverse(scale)
        quants = round_half_away(values * factor)
        clear_unless_finite(quants, factor)
        blocks["d"] = scale[:, 0]
    blocks["qs"] = quants.astype(np.int8)
    return blocks.view(np.uint8).reshape(len(values), -1)
