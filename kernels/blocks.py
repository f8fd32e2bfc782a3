"""The binary layout of quantised blocks: one NumPy structured dtype per format, with fields in file order.

In GGUF's formats, a block holds 32, 64 or 256 consecutive weights of one row. Its fields are:

- `d`: a float16 scale; `m`: a float16 minimum; `dmin`: the float16 scale of the minima of sub-blocks
- `e`: the exponent of a scale that is a power of two
- `qs`, `ql`: the quants, or their low bits; `qh`, `hmask`: the high bits of the quants
- `scales`, `scales_l`, `scales_h`: the scales of sub-blocks; in formats with `dmin`, also the minima
- `signs`: the signs of weights, in IQ2_XXS and IQ3_XXS also scales

In IQ1 to IQ3, `grid`, `qs` and `qh` hold indices into a codebook; `qs` and `qh` may also hold signs and scales. A block
of MLX's types is a group of weights (`group`). `mlx_engine/quant` unpacks the quants. All numbers are little-endian.
Blocks are not padded, so they are unaligned.

Source of GGUF's formats: the structs `block_*` of ggml-common.h,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np

Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])

Q2_K = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", (32,)), ("qs", "u1", (64,)), ("scales", "u1", (12,)), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qs", "u1", (128,))])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qh", "u1", (32,)), ("qs", "u1", (128,))])
Q6_K = np.dtype([("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")])

TQ1_0 = np.dtype([("qs", "u1", (48,)), ("qh", "u1", (4,)), ("d", "<f2")])
TQ2_0 = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])

IQ1_S = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])
IQ1_M = np.dtype([("qs", "u1", (32,)), ("qh", "u1", (16,)), ("scales", "<u2", (4,))])
IQ2_XXS = np.dtype([("d", "<f2"), ("qs", [("grid", "u1", (4,)), ("signs", "<u4")], (8,))])
IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])
IQ2_S = np.dtype(
    [("d", "<f2"), ("qs", "u1", (32,)), ("signs", "u1", (32,)), ("qh", "u1", (8,)), ("scales", "u1", (8,))]
)
IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("signs", "<u4", (8,))])
IQ3_S = np.dtype(
    [("d", "<f2"), ("qs", "u1", (64,)), ("qh", "u1", (8,)), ("signs", "u1", (32,)), ("scales", "u1", (4,))]
)
IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))])

MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", (16,))])
NVFP4 = np.dtype([("scales", "u1", (4,)), ("qs", "u1", (4, 8))])


def group(size: int, bits: int, scale: str, *, has_biases: bool) -> np.dtype[np.void]:
    """Return the layout of one group of MLX's quantised types: scale, bias (if `has_biases`), packed quants.

    The group has `size` weights, of `bits` bits each. `scale` is the type of the scale and the bias: F16, BF16 (a
    uint16 here, because NumPy has no bfloat16), F32 or U8.

    Quants are packed from the lowest bits upwards, as in MLX, with one exception: 4-bit quants of groups with biases
    are packed as in Q4_1, because AVX2 unpacks them with fewer instructions. For each 32 weights, byte j then has quant
    j in its low four bits, and quant j + 16 in its high four bits.
    """
    kind = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "U8": "u1"}[scale]
    biases = [("m", kind)] if has_biases else []
    return np.dtype([("d", kind), *biases, ("qs", "u1", (size * bits // 8,))])
