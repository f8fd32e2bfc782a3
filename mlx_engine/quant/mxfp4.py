"""MXFP4 in two orders of its quants: that of GGUF, and that of MLX, which Hugging Face's folders of gpt-oss also have.

A group has 32 quants in 16 bytes: in halves in GGUF, in pairs in MLX (`nibbles.py`). Conversion moves bits, and weights
stay the same, but for the sign of a zero, which GGUF does not have.
"""

from __future__ import annotations

import numpy as np

from mlx_engine.quant import nibbles
from mlx_engine.quant.group_types import fixed
from mlx_engine.quant.group_weight import GroupWeight, Parts, split
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight

GGUF, MLX = BY_NAME["MXFP4"], fixed("mxfp4")
# A scale that is an infinity in MLX and 2 ** 128 in GGUF.
_UNLIKE = 255
# Groups that are converted at a time: temporaries take a few megabytes.
_PIECE = 1 << 17


def in_gguf_order(weight: Weight) -> Weight:
    """Return a weight of MLX's type as one of GGUF's; any other weight, and one with an infinite scale, as it is."""
    if weight.type != MLX:
        return weight
    parts = split(weight, MLX)
    if (parts.scales == _UNLIKE).any():
        return weight
    blocks = np.empty((len(parts.quants), GGUF.block_bytes), dtype=np.uint8)
    blocks[:, :1] = parts.scales
    for first in range(0, len(blocks), _PIECE):
        some = slice(first, first + _PIECE)
        nibbles.in_halves(parts.quants[some], blocks[some, 1:])
    return Weight(weight.name, weight.shape, GGUF, blocks.reshape(-1))


def in_mlx_order(weight: Weight) -> Weight:
    """Return a weight of GGUF's type as one of MLX's; any other weight, and one with a scale unlike MLX's, as it is."""
    if weight.type != GGUF:
        return weight
    blocks = weight.data.reshape(-1, GGUF.block_bytes)
    if (blocks[:, 0] == _UNLIKE).any():
        return weight
    quants = np.empty((len(blocks), GGUF.block_bytes - 1), dtype=np.uint8)
    for first in range(0, len(blocks), _PIECE):
        some = slice(first, first + _PIECE)
        nibbles.in_pairs(blocks[some, 1:], quants[some])
    scales = np.ascontiguousarray(blocks[:, :1])
    return GroupWeight(weight.name, weight.shape, MLX, Parts(quants, scales, None))
