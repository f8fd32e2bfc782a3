"""IQ3_XXS and IQ3_S: 256 weights in groups of 4, each the index of a point with positive coordinates.

IQ3_XXS: `weight = sign * d * (scale + 1/2) / 2 * coordinate`. An index has 8 bits. A 32-bit word per 32 weights has
four times 7 sign bits, of which the eighth makes the number of minus signs even, and a 4-bit scale above them.

IQ3_S: `weight = sign * d * (2 * scale + 1) * coordinate`. An index has 9 bits, of which `qh` has the highest. Signs
have 8 bits for 8 weights. A scale is 4 bits, for 32 weights.

Source: `dequantize_row_iq3_xxs` and `dequantize_row_iq3_s`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.grids import grid, signs, with_parity
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups


def dequantize_xxs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 98) bytes of IQ3_XXS to (n, 256) weights."""
    block = blocks.view(layout.IQ3_XXS)[:, 0]
    bits = (block["signs"][..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & np.uint32(127)).astype(np.uint8)
    points = grid("IQ3_XXS")[block["qs"]].reshape(-1, 8, 32) * signs(with_parity(bits)).reshape(-1, 8, 32)
    scales = ((block["signs"] >> np.uint32(28)).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return scale_groups(float_scales(block["d"], scales), points)


def dequantize_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 110) bytes of IQ3_S to (n, 256) weights."""
    block = blocks.view(layout.IQ3_S)[:, 0]
    high = np.unpackbits(block["qh"], axis=1, bitorder="little").astype(np.uint16)
    points = grid("IQ3_S")[block["qs"] | high << np.uint16(8)].reshape(-1, 8, 32)
    scales = 2 * bit_fields(block["scales"][..., None], 4).reshape(-1, 8).astype(np.float32) + 1
    return scale_groups(float_scales(block["d"], scales), points * signs(block["signs"]).reshape(-1, 8, 32))
