"""Q5_1: 32 weights share a float16 scale and a float16 minimum; each is 5 bits. `weight = d * q + m`.

The low four bits are stored as in Q4_0; bit `i` of the 32 bits `qh` is the fifth bit of weight `i`.

Source: `dequantize_row_q5_1`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, pack_fifths
from mlx_engine.quant.scale_search import affine_groups


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 24) bytes to (n, 32) weights, `d * q + m`."""
    block = blocks.view(layout.Q5_1)[:, 0]
    fifth = np.unpackbits(block["qh"], axis=1, bitorder="little")
    quants = (bit_fields(block["qs"], 4).reshape(-1, 32) | fifth << np.uint8(4)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # any bytes are weights: scale and minimum may be infinite or NaN
        return block["d"].astype(np.float32)[:, None] * quants + block["m"].astype(np.float32)[:, None]


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 32) weights to (n, 24) bytes. Errors are smaller than ggml's, which tries one scale.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    blocks = np.empty(len(values), layout.Q5_1)
    blocks["d"], blocks["m"], quants = affine_groups(values, 31)
    blocks["qs"], blocks["qh"] = pack_fifths(quants)
    return blocks.view(np.uint8).reshape(len(values), -1)
