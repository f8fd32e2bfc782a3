"""MLX's quantised types: groups of consecutive weights in a row share a scale and, in the mode "affine", a bias.

Here a block of such a type is one group: its scale, bias and packed quants side by side. mlx-lm's folders store scales,
biases and quants in separate tensors; `group_weight.py` joins them into blocks.

In the mode "affine", quants are unsigned integers. In the other modes, quants are floats: E2M1 with 4 bits, or E4M3
with 8 bits. Scales of "mxfp4" and "mxfp8" are powers of two (E8M0), scales of "nvfp4" are E4M3 floats.

Sources: `mx.quantize` of MLX 0.32, https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
and "OCP Microscaling Formats (MX) Specification", version 1.0, for E2M1, E4M3 and E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks
from mlx_engine.quant import packing
from mlx_engine.quant.floats import dequantize_bf16
from mlx_engine.quant.types import BY_NAME, GGMLType

Mode: TypeAlias = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES: tuple[str, ...] = get_args(Mode)
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# Maps each mode in which MLX supports only one number of bits and one group size to (bits, group size).
FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
# `FLOATS` has the types of scales and biases in the mode "affine", and `BYTE` is the type of scales in the other modes.
# The types are named as in safetensors.
FLOATS, BYTE = ("F16", "BF16", "F32"), "U8"


@dataclass(frozen=True, slots=True)
class GroupType(GGMLType):
    """A type of MLX. `id` is -1, because GGUF has no such type; `block_size` is the group size.

    Attributes:
        mode: one of `MODES`; defines how weights are computed from quants and scales.
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
        """Whether a block stores 4-bit quants in GGUF's order: of 32 quants, byte j has quants j and j + 16.

        In MLX's order, byte j has quants 2 j and 2 j + 1.
        """
        return self.has_biases and self.bits == 4

    @property
    def layout(self) -> np.dtype[np.void]:
        """The fields of a block: the scale `d`, the bias `m` (in the mode "affine"), and the quants `qs`."""
        return blocks.group(self.block_size, self.bits, self.scale, has_biases=self.has_biases)


def affine(bits: int, group: int, scale: str) -> GroupType:
    """Return the type of the mode "affine" with `bits` bits per quant, the group size, and the type of scales."""
    layout = blocks.group(group, bits, scale, has_biases=True)
    return GroupType(-1, f"AFFINE{bits}_G{group}_{scale}", group, layout.itemsize, "affine", bits, scale)


def fixed(mode: str) -> GroupType:
    """Return the type of a mode in `FIXED`. MXFP4 and NVFP4 of GGUF are other types, with another order of quants."""
    bits, group = FIXED[mode]
    layout = blocks.group(group, bits, BYTE, has_biases=False)
    return GroupType(-1, f"MLX_{mode.upper()}", group, layout.itemsize, mode, bits, BYTE)


GROUP_TYPES = (
    *(affine(bits, group, scale) for bits in AFFINE_BITS for group in AFFINE_GROUPS for scale in FLOATS),
    *map(fixed, FIXED),
)


def dequantize_group(type_: GroupType, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, block bytes) to (n, group size) weights.

    In the mode "affine", a weight is `scale * q + bias`. Scale and bias are widened to float32, and the product and the
    sum are each rounded to float32. The weights are bit-identical to those of `mx.dequantize` on the CPU with float32
    scales and biases. With 16-bit scales, `mx.dequantize` computes in 16 bits, which is less exact. But with float32
    activations, `mx.quantized_matmul` widens the scales, as this function does.
    """
    block = blocks.view(type_.layout)[:, 0]
    quants = packing.unpack_halves(block["qs"]) if type_.in_halves else unpack(block["qs"], type_.bits)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be infinite or NaN
        if type_.has_biases:
            weights = quants.astype(np.float32)
            weights *= _widened(block["d"], type_)[:, None]
            weights += _widened(block["m"], type_)[:, None]
            return weights
        values, scales = (E2M1 if type_.bits == 4 else E4M3), (E4M3 if type_.mode == "nvfp4" else E8M0)
        weights = values[quants]
        weights *= scales[block["d"]][:, None]
        return weights


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unpack (n, group size * bits / 8) bytes in MLX's order to quants (n, group size), each from 0 to 2**bits - 1.

    Each run of `bits` bytes holds 8 quants, from the lowest bit on, so a quant may span two bytes.
    """
    if bits == 8:
        return packed
    eights = packed.reshape(len(packed), -1, bits)
    quants = np.empty((*eights.shape[:2], 8), dtype=np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        some = eights[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            some = some | eights[..., byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(some, np.uint8((1 << bits) - 1), out=quants[..., i])
    return quants.reshape(len(packed), -1)


def _widened(values: NDArray[np.generic], type_: GroupType) -> NDArray[np.float32]:
    if type_.scale != "BF16":
        return values.astype(np.float32)
    return dequantize_bf16(np.ascontiguousarray(values).view(np.uint8))


def _e4m3() -> NDArray[np.float32]:
    """Return the E4M3 value of each byte: a sign, 4 bits of exponent, 3 bits of mantissa; 127 and 255 are NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.float32) / np.float32(2)
# E2M1 has the value of each 4-bit quant, E4M3 of each byte (a quant or a scale), and E8M0 of each byte (a scale). The
# last value of E8M0 is NaN in the specification, and infinity in MLX.
E2M1 = np.concatenate((_MAGNITUDES, -_MAGNITUDES))
E4M3 = _e4m3()
E8M0 = np.concatenate((np.ldexp(np.float32(1), np.arange(-127, 128)), [np.inf])).astype(np.float32)
