"""MXFP4 and NVFP4: a weight is a 4-bit float (E2M1), and a group of weights has an 8-bit scale.

MXFP4: 32 weights share a power of two (E8M0, exponent bias 127); quants are stored as in Q4_0. NVFP4: a block is 4
groups of 16 weights; a scale is an unsigned float of 4 exponent and 3 mantissa bits (E4M3, bias 7). The first 8 weights
of a group are in the low halves of its bytes. ggml doubles the levels to integers and halves the scales; so the
smallest scale of MXFP4, 2 ** -127, becomes the float32 subnormal 2 ** -128.

Source: `dequantize_row_mxfp4` and `dequantize_row_nvfp4`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, scale_groups

# Twice the values of E2M1. ggml reads the code of -0 as 0.
LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
# Half of 2 ** (e - 127), for every byte e.
HALF_POWERS = np.ldexp(np.float32(1), np.arange(256) - 128)


def _half_e4m3() -> NDArray[np.float32]:
    """Return half the value of every byte as E4M3; the sign bit is ignored, and 127, which is NaN, is 0."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, (codes & 7).astype(np.float32)
    significands = np.where(exponents, 8 + mantissas, mantissas)
    values: NDArray[np.float32] = np.ldexp(significands.astype(np.float32), np.maximum(exponents, 1) - 11)
    values[127] = 0
    return values


_HALF_SCALES = _half_e4m3()


def dequantize_mx(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 17) bytes of MXFP4 to (n, 32) weights."""
    block = blocks.view(layout.MXFP4)[:, 0]
    return scale_groups(HALF_POWERS[block["e"]][:, None], LEVELS[bit_fields(block["qs"], 4)])


def dequantize_nv(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 36) bytes of NVFP4 to (n, 64) weights."""
    block = blocks.view(layout.NVFP4)[:, 0]
    return scale_groups(_HALF_SCALES[block["scales"]], LEVELS[bit_fields(block["qs"], 4)])
