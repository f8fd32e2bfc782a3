"""Q5_0: 32 weights share one float16 scale; each is 5 bits with an offset of 16. `weight = d * (q - 16)`.

The low four bits are stored as in Q4_0; bit `i` of the 32 bits `qh` is the fifth bit of weight `i`.

Source: `dequantize_row_q5_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, pack_fifths
from mlx_engine.quant.scale_search import symmetric_groups


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 22) bytes to (n, 32) weights, `d * (q - 16)`."""
    block = blocks.view(layout.Q5_0)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.int8) - np.int8(16)
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a quant 0
        return block["d"].astype(np.float32)[:, None] * quants.astype(np.float32)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 22) bytes. Errors are smaller than ggml's, which tries one scale.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    d, quants = symmetric_groups(values, 16)
    blocks = np.empty(len(values), layout.Q5_0)
    blocks["d"] = d
    blocks["qs"], blocks["qh"] = pack_fifths((quants + np.int8(16)).view(np.uint8))
    return blocks.view(np.uint8).reshape(len(values), -1)
