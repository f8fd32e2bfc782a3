"""Q5_0: 32 weights share one float16 scale; each is 5 bits, counted from -16. `weight = d * (q - 16)`.

The low four bits lie as in Q4_0; bit `i` of the 32 bits `qh` is the fifth bit of weight `i`.

Source: `dequantize_row_q5_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """`d * (q - 16)`, (n, 22) bytes to (n, 32) weights."""
    block = blocks.view(layout.Q5_0)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    codes = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.int8) - np.int8(16)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a code 0
        return block["d"].astype(np.float32)[:, None] * codes.astype(np.float32)
