"""IQ2_XXS, IQ2_XS and IQ2_S: 256 weights in groups of 8, each the index of a point with positive coordinates.

`weight = sign * d * (scale + 1/2) / 4 * coordinate`. The formats differ in the size of the grid and in how they pack
signs and scales:
- IQ2_XXS: an index has 8 bits. A 32-bit word per 32 weights has four times 7 sign bits, and a 4-bit scale above them.
- IQ2_XS: a 16-bit word per 8 weights has an index of 9 bits, and 7 sign bits above it. A scale is 4 bits, for 16
  weights.
- IQ2_S: an index has 10 bits, of which `qh` has the high 2. Signs have 8 bits. A scale is 4 bits, for 16 weights.

With 7 sign bits, the eighth makes the number of minus signs even.

Source: `dequantize_row_iq2_xxs`, `dequantize_row_iq2_xs` and `dequantize_row_iq2_s`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.grids import grid, signs, with_parity
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups


def dequantize_xxs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 66) bytes of IQ2_XXS to (n, 256) weights."""
    block = blocks.view(layout.IQ2_XXS)[:, 0]
    words = block["qs"]["signs"]
    bits = (words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & np.uint32(127)).astype(np.uint8)
    points = grid("IQ2_XXS")[block["qs"]["grid"]] * signs(with_parity(bits))
    return _scaled(block["d"], words >> np.uint32(28), points)


def dequantize_xs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 74) bytes of IQ2_XS to (n, 256) weights."""
    block = blocks.view(layout.IQ2_XS)[:, 0]
    bits = (block["qs"] >> np.uint16(9)).astype(np.uint8)
    points = grid("IQ2_XS")[block["qs"] & np.uint16(511)] * signs(with_parity(bits))
    return _scaled(block["d"], bit_fields(block["scales"][..., None], 4).reshape(-1, 16), points)


def dequantize_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 82) bytes of IQ2_S to (n, 256) weights."""
    block = blocks.view(layout.IQ2_S)[:, 0]
    high = bit_fields(block["qh"][..., None], 2).reshape(-1, 32).astype(np.uint16)
    points = grid("IQ2_S")[block["qs"] | high << np.uint16(8)] * signs(block["signs"])
    return _scaled(block["d"], bit_fields(block["scales"][..., None], 4).reshape(-1, 16), points)


def _scaled(
    factor: NDArray[np.float16], scales: NDArray[np.unsignedinteger], points: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Multiply points by `factor`, (n,), and by the scales of their groups, (n, 8 or 16)."""
    quarters = (scales.astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return scale_groups(float_scales(factor, quarters), points)
