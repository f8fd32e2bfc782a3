"""Weights whose bytes are drawn at random: formats that nothing here can write are read all the same."""

from __future__ import annotations

import numpy as np

from kernels import blocks
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.group_types import GROUP_TYPES
from mlx_engine.quant.weight import Weight


def random_blocks(rng: np.random.Generator, name: str, type_name: str, n: int, k: int, size: float = 1.0) -> Weight:
    """An (n, k) matrix of Q4_0, Q4_1, Q4_K or Q6_K, with weights of about `size`, as many above 0 as below."""
    kind = getattr(blocks, type_name)
    type_ = BY_NAME[type_name]
    made = rng.integers(0, 256, type_.bytes_for(n * k), dtype=np.uint8).view(kind)
    # A code, and what it is multiplied with in its block, on average.
    spread = {"Q4_0": 4.6, "Q4_1": 4.6, "Q4_K": 4.6 * 36, "Q6_K": 18.5 * 74}[type_name]
    made["d"] = size / spread * (0.5 + rng.random(len(made)))
    if type_name == "Q4_1":
        made["m"] = -7.5 * made["d"].astype(np.float32)
    if type_name == "Q4_K":
        made["dmin"] = 7.5 * made["d"].astype(np.float32)
    return Weight(name, (n, k), type_, made.view(np.uint8))


def random_groups(rng: np.random.Generator, name: str, type_name: str, n: int, k: int) -> Weight:
    """Return an (n, k) matrix of one of MLX's affine types, with weights of about 1, as many above 0 as below."""
    type_ = next(type_ for type_ in GROUP_TYPES if type_.name == type_name)
    made = rng.integers(0, 256, type_.bytes_for(n * k), dtype=np.uint8).view(type_.layout)
    scales = (0.5 + rng.random(len(made)).astype(np.float32)) * np.float32(4 / 2**type_.bits)
    for field, values in (("d", scales), ("m", scales * np.float32(-(2**type_.bits) / 2))):
        made[field] = values.view(np.uint32) >> 16 if type_.scale == "BF16" else values
    return Weight(name, (n, k), type_, made.view(np.uint8))
