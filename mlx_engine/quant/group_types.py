"""MLX's quantised types: groups of consecutive weights of a row share a scale, and in the mode "affine" a bias.

A block of such a type is one group: its scale, its bias, its packed quants, side by side. mlx-lm's folders store the
three in separate tensors; `group_weight.py` joins them.

Source: `mx.quantize` of MLX 0.32, https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from mlx_engine.kernels import blocks
from mlx_engine.quant.types import BY_NAME, GGMLType

Mode: TypeAlias = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES: tuple[str, ...] = get_args(Mode)
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# The bits and the group size of the modes that have one form only.
FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
# Types of affine scales and biases, and of the scales of the other modes, as safetensors spells them.
FLOATS, BYTE = ("F16", "BF16", "F32"), "U8"


@dataclass(frozen=True, slots=True)
class GroupType(GGMLType):
    """A type of MLX. `id` is -1, because GGUF has no such type; `block_size` is the group size.

    Attributes:
        mode: how quants and scales become weights.
        bits: bits per quant.
        scale: the type of scales and biases: F16, BF16, F32, or U8 for the modes without biases.
    """

    mode: str
    bits: int
    scale: str

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, and of a bias."""
        return 1 if self.scale == BYTE else BY_NAME[self.scale].block_bytes

    @property
    def has_biases(self) -> bool:
        """Whether groups have biases."""
        return self.mode == "affine"

    @property
    def in_halves(self) -> bool:
        """Whether the quants of a block lie in halves (`nibbles.py`); else in MLX's order, as in the stored tensors."""
        return self.has_biases and self.bits == 4

    @property
    def layout(self) -> np.dtype[np.void]:
        """The fields of a block: `d`, `m` if there are biases, `qs`."""
        return blocks.group(self.block_size, self.bits, self.scale, has_biases=self.has_biases)


def affine(bits: int, group: int, scale: str) -> GroupType:
    """Return the type of mode "affine" with these bits, group size and type of scales."""
    layout = blocks.group(group, bits, scale, has_biases=True)
    return GroupType(-1, f"AFFINE{bits}_G{group}_{scale}", group, layout.itemsize, "affine", bits, scale)


def fixed(mode: str) -> GroupType:
    """Return the type of a mode that has one form only. GGUF's MXFP4 and NVFP4 order their quants differently."""
    bits, group = FIXED[mode]
    layout = blocks.group(group, bits, BYTE, has_biases=False)
    return GroupType(-1, f"MLX_{mode.upper()}", group, layout.itemsize, mode, bits, BYTE)


GROUP_TYPES = (
    *(affine(bits, group, scale) for bits in AFFINE_BITS for group in AFFINE_GROUPS for scale in FLOATS),
    *map(fixed, FIXED),
)
