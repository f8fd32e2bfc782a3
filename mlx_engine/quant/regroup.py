"""GGUF types whose weights MLX's mode "affine" can have without rounding: Q8_0, Q4_0 and Q4_1, as groups of 32.

Signed quants are stored with an offset z: `d * q = d * (q + z) - z * d`. The scales are float32, which has the product
of a float16 and a quant exactly; in float16, the bias of a scale above 511.75 would overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.group_types import GroupType, affine
from mlx_engine.quant.group_weight import GroupWeight, Parts
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight

# By GGUF type, the type in groups.
EXACT: Mapping[str, GroupType] = {
    "Q8_0": affine(8, 32, "F32"),
    "Q4_0": affine(4, 32, "F32"),
    "Q4_1": affine(4, 32, "F32"),
}
OFFSETS = {"Q8_0": 128, "Q4_0": 8}
# Groups that are converted at a time: temporaries take a few megabytes.
_PIECE = 1 << 17


def in_groups(weight: Weight) -> Weight:
    """Return a weight in the group type of `EXACT`; return any other weight, or one with infinite scales, as it is."""
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
