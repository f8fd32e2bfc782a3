"""Q5_K: 256 weights in 8 groups of 32; a weight is 5 bits, a group has a 6-bit scale and a 6-bit minimum.

`weight = (d * scale) * q - (dmin * minimum)`. The low four bits are stored as in Q4_K; bit `g` of the 32 bytes
`qh` is the fifth bit of the weights of group `g`.

Source: `dequantize_row_q5_K`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.k_scales import packed, scales_and_minima
from mlx_engine.quant.packing import bit_fields
from mlx_engine.quant.scale_search import affine


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 176) bytes to (n, 256) weights."""
    block = blocks.view(layout.Q5_K)[:, 0]
    low = bit_fields(block["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    quants = (low | bit_fields(block["qh"], 1) << np.uint8(4)).astype(np.float32)
    scales, minima = scales_and_minima(block["scales"])
    with np.errstate(invalid="ignore"):  # any bytes are weights: d and dmin may be infinite or NaN
        scales *= block["d"].astype(np.float32)[:, None]
        minima *= block["dmin"].astype(np.float32)[:, None]
        return (scales[..., None] * quants - minima[..., None]).reshape(-1, 256)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 256) weights to (n, 176) bytes.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    found, blocks = affine(values, 31), np.empty(len(values), layout.Q5_K)
    blocks["d"], blocks["dmin"], blocks["scales"] = found.d, found.dmin, packed(found.scales, found.minima)
    low = (found.quants & np.uint8(15)).reshape(-1, 4, 2, 32)
    blocks["qs"] = (low[:, :, 0] | low[:, :, 1] << np.uint8(4)).reshape(-1, 128)
    fifth = np.ascontiguousarray((found.quants >> np.uint8(4)).transpose(0, 2, 1))
    blocks["qh"] = np.packbits(fifth, axis=2, bitorder="little")[:, :, 0]
    return blocks.view(np.uint8).reshape(len(values), -1)
