"""Conversions between types of GGUF and of MLX that round no weight.

- Q8_0, Q4_0 and Q4_1 become groups of 32 in MLX's mode "affine". Signed quants are stored with an offset z:
  `d * q = d * (q + z) - z * d`. The scales are float32, which has the product of a float16 and a quant exactly; in
  float16, the bias of a scale above 511.75 would overflow.
- MXFP4 has 32 quants in 16 bytes: in halves in GGUF; in pairs in MLX and in Hugging Face's folders of gpt-oss
  (`packing.py`). Weights stay the same, but for the sign of a zero, which GGUF does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant import packing
from mlx_engine.quant.group_weight import GroupWeight, Parts, split
from mlx_engine.quant.groups import GroupType, affine, fixed
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight

# By GGUF type, the type in groups.
EXACT: Mapping[str, GroupType] = {
    "Q8_0": affine(8, 32, "F32"),
    "Q4_0": affine(4, 32, "F32"),
    "Q4_1": affine(4, 32, "F32"),
}
OFFSETS = {"Q8_0": 128, "Q4_0": 8}

GGUF, MLX = BY_NAME["MXFP4"], fixed("mxfp4")
# A scale that is an infinity in MLX and 2 ** 128 in GGUF.
_UNLIKE = 255
# Groups that are converted at a time: temporaries take a few megabytes.
_PIECE = 1 << 17


def in_groups(weight: Weight) -> Weight:
    """Return a weight in the group type of `EXACT`; return others, and weights with infinite scales, unchanged."""
    if weight.type.name not in EXACT:
        return weight
    type_, stored = EXACT[weight.type.name], BY_NAME[weight.type.name]
    blocks = weight.data.reshape(-1, stored.block_bytes)
    n_floats = 2 if weight.type.name == "Q4_1" else 1
    floats = np.ascontiguousarray(blocks[:, : 2 * n_floats]).view(np.float16).astype(np.float32)
    if not np.isfinite(floats).all():
        return weight
    scales = np.ascontiguousarray(floats[:, :1])
    biases = np.ascontiguousarray(floats[:, 1:]) if n_floats == 2 else scales * np.float32(-OFFSETS[weight.type.name])
    quants = np.empty((len(blocks), type_.block_size * type_.bits // 8), dtype=np.uint8)
    for first in range(0, len(blocks), _PIECE):
        some = slice(first, first + _PIECE)
        quants[some] = _in_order(blocks[some, 2 * n_floats :], type_.bits)
    return GroupWeight(weight.name, weight.shape, type_, Parts(quants, scales.view(np.uint8), biases.view(np.uint8)))


def _in_order(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return unsigned quants in MLX's order. GGUF has signed bytes, or quants j and j + 16 in the halves of byte j."""
    quants: NDArray[np.uint8]
    if bits == 8:
        quants = packed ^ np.uint8(0x80)
    else:
        halves = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=1)
        quants = halves[:, ::2] | halves[:, 1::2] << np.uint8(4)
    return quants


def in_gguf_order(weight: Weight) -> Weight:
    """Return a weight of MLX's type as one of GGUF's; return others, and weights with infinite scales, unchanged."""
    if weight.type != MLX:
        return weight
    parts = split(weight, MLX)
    if (parts.scales == _UNLIKE).any():
        return weight
    blocks = np.empty((len(parts.quants), GGUF.block_bytes), dtype=np.uint8)
    blocks[:, :1] = parts.scales
    for first in range(0, len(blocks), _PIECE):
        some = slice(first, first + _PIECE)
        packing.in_halves(parts.quants[some], blocks[some, 1:])
    return Weight(weight.name, weight.shape, GGUF, blocks.reshape(-1))


def in_mlx_order(weight: Weight) -> Weight:
    """Return a weight of GGUF's type as one of MLX's; return others, and weights whose scales MLX lacks, unchanged."""
    if weight.type != GGUF:
        return weight
    blocks = weight.data.reshape(-1, GGUF.block_bytes)
    if (blocks[:, 0] == _UNLIKE).any():
        return weight
    quants = np.empty((len(blocks), GGUF.block_bytes - 1), dtype=np.uint8)
    for first in range(0, len(blocks), _PIECE):
        some = slice(first, first + _PIECE)
        packing.in_pairs(blocks[some, 1:], quants[some])
    scales = np.ascontiguousarray(blocks[:, :1])
    return GroupWeight(weight.name, weight.shape, MLX, Parts(quants, scales, None))
