"""Weights whose bytes are drawn at random: formats that nothing here can write are read all the same."""

from __future__ import annotations

import numpy as np

from kernels import blocks
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.groups import GROUP_TYPES
from mlx_engine.quant.weight import Weight

# A quant, and the scale of its group, on average.
SPREAD = {
    "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q2_K": 1.1 * 8.8, "Q3_K": 2.3 * 18.5, "Q4_K": 4.6 * 36,
    "Q5_K": 9.2 * 36, "Q6_K": 18.5 * 74, "IQ4_NL": 69, "IQ4_XS": 69 * 18.5, "MXFP4": 3,
}  # fmt: skip
# What the minimum is multiplied with, so that as many weights are above 0 as below.
MIDDLE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def random_blocks(rng: np.random.Generator, name: str, type_name: str, n: int, k: int, size: float = 1.0) -> Weight:
    """An (n, k) matrix of a type in `SPREAD`, with weights of about `size`, as many above 0 as below."""
    kind = getattr(blocks, type_name)
    type_ = BY_NAME[type_name]
    made = rng.integers(0, 256, type_.bytes_for(n * k), dtype=np.uint8).view(kind)
    if type_name == "MXFP4":
        made["e"] = 127 + np.floor(np.log2(size / 3)) + rng.integers(0, 2, len(made))
        return Weight(name, (n, k), type_, made.view(np.uint8))
    made["d"] = size / SPREAD[type_name] * (0.5 + rng.random(len(made)))
    if type_name in MIDDLE:
        made["m" if "m" in (kind.names or ()) else "dmin"] = MIDDLE[type_name] * made["d"].astype(np.float32)
    return Weight(name, (n, k), type_, made.view(np.uint8))


def random_groups(rng: np.random.Generator, name: str, type_name: str, n: int, k: int) -> Weight:
    """Return an (n, k) matrix of one of MLX's affine types, with weights of about 1, as many above 0 as below."""
    type_ = next(type_ for type_ in GROUP_TYPES if type_.name == type_name)
    made = rng.integers(0, 256, type_.bytes_for(n * k), dtype=np.uint8).view(type_.layout)
    scales = (0.5 + rng.random(len(made)).astype(np.float32)) * np.float32(4 / 2**type_.bits)
    for field, values in (("d", scales), ("m", scales * np.float32(-(2**type_.bits) / 2))):
        made[field] = values.view(np.uint32) >> 16 if type_.scale == "BF16" else values
    return Weight(name, (n, k), type_, made.view(np.uint8))
