"""Dequantise low-bit formats: GGUF's IQ1 to IQ4, MXFP4, NVFP4, TQ1_0 and TQ2_0.

IQ1, IQ2 and IQ3 divide 256 weights into groups of 8 or 4, and store for each group the index of a point of a grid (a
codebook of vectors). Each coordinate of a point is one of a few levels. IQ4 stores for each weight the index of one of
16 levels. TQ1_0 and TQ2_0 have the quants -1, 0 and 1.

With n coordinates and L levels, L ** n points are possible. They are numbered from 0: the base-L digits of a number,
lowest first, are the indices of the levels. `grids.bin` has a bitmap per grid: bit i is 1 if the grid contains the
point with number i. `grid` returns the points of a grid in ascending order of their numbers. The indices in a block
refer to this order.

Sources: `dequantize_row_iq*` of `ggml-quants.c`, and the tables `iq*_grid` of `ggml-common.h`, in
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups

_DELTA = np.float32(0.125)


def dequantize_iq1_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 50) bytes to (n, 256) weights `d * (2 * scale + 1) * (coordinate + delta)`.

    A group has 8 weights. A coordinate is -1, 0 or 1; delta is 1/8 or -1/8. The index of a point has 11 bits, of which
    `qs` has the low 8. `qh` has a 16-bit word per 32 weights, with the high 3 bits of four indices, the scale (bits 12
    to 14) and the sign of delta (bit 15).
    """
    block = blocks.view(layout.IQ1_S)[:, 0]
    high = block["qh"][..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)
    scales = 2 * (block["qh"] >> np.uint16(12) & np.uint16(7)).astype(np.float32) + 1
    deltas = np.where(block["qh"] >> np.uint16(15), -_DELTA, _DELTA)
    points = grid("IQ1")[block["qs"] | high.reshape(-1, 32) << np.uint16(8)].reshape(-1, 8, 32)
    return scale_groups(float_scales(block["d"], scales), points + deltas[..., None])


def dequantize_iq1_m(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 56) bytes to (n, 256) weights, with the formula of `dequantize_iq1_s`.

    For each 8 weights, half a byte of `qh` has the high 3 bits of the index, and the sign of delta above them. Each of
    the four 16-bit words of `scales` has four 3-bit scales, each for 16 weights, and 4 bits of `d` above them.
    """
    block = blocks.view(layout.IQ1_M)[:, 0]
    nibbles = bit_fields(block["qh"][..., None], 4).reshape(-1, 32)
    deltas = np.where(nibbles >> np.uint8(3), -_DELTA, _DELTA)
    points = grid("IQ1")[block["qs"] | (nibbles & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    words = block["scales"]
    scales = 2 * (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & np.uint16(7)).astype(np.float32) + 1
    parts = words >> np.uint16(12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    factor = np.bitwise_or.reduce(parts, axis=1).view(np.float16)
    return scale_groups(float_scales(factor, scales.reshape(-1, 16)), points + deltas[..., None])


def dequantize_iq2_xxs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 66) bytes to (n, 256) weights `sign * d * (scale + 1/2) / 4 * coordinate`, in groups of 8.

    An index has 8 bits. For each 32 weights, a 32-bit word has 7 sign bits for each of the four groups (`with_parity`
    computes the eighth), and above them a 4-bit scale.
    """
    block = blocks.view(layout.IQ2_XXS)[:, 0]
    words = block["qs"]["signs"]
    bits = (words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & np.uint32(127)).astype(np.uint8)
    points = grid("IQ2_XXS")[block["qs"]["grid"]] * signs(with_parity(bits))
    return _scaled(block["d"], words >> np.uint32(28), points)


def dequantize_iq2_xs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 74) bytes to (n, 256) weights, with the formula of `dequantize_iq2_xxs`.

    For each 8 weights, a 16-bit word has a 9-bit index, and 7 sign bits above it (`with_parity` computes the eighth).
    Every 16 weights share a 4-bit scale.
    """
    block = blocks.view(layout.IQ2_XS)[:, 0]
    bits = (block["qs"] >> np.uint16(9)).astype(np.uint8)
    points = grid("IQ2_XS")[block["qs"] & np.uint16(511)] * signs(with_parity(bits))
    return _scaled(block["d"], bit_fields(block["scales"][..., None], 4).reshape(-1, 16), points)


def dequantize_iq2_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 82) bytes to (n, 256) weights, with the formula of `dequantize_iq2_xxs`.

    An index has 10 bits, of which `qh` has the high 2. A group has 8 sign bits. Every 16 weights share a 4-bit scale.
    """
    block = blocks.view(layout.IQ2_S)[:, 0]
    high = bit_fields(block["qh"][..., None], 2).reshape(-1, 32).astype(np.uint16)
    points = grid("IQ2_S")[block["qs"] | high << np.uint16(8)] * signs(block["signs"])
    return _scaled(block["d"], bit_fields(block["scales"][..., None], 4).reshape(-1, 16), points)


def _scaled(
    factor: NDArray[np.float16], scales: NDArray[np.unsignedinteger], points: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the weights (n, 256): `factor * (scale + 1/2) / 4 * point`, with factors (n,) and scales (n, 8 or 16)."""
    quarters = (scales.astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return scale_groups(float_scales(factor, quarters), points)


def dequantize_iq3_xxs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 98) bytes to (n, 256) weights `sign * d * (scale + 1/2) / 2 * coordinate`, in groups of 4.

    An index has 8 bits. For each 32 weights, a 32-bit word has four fields of 7 sign bits, each field for 8 weights
    (`with_parity` computes the eighth bit), and above them a 4-bit scale.
    """
    block = blocks.view(layout.IQ3_XXS)[:, 0]
    bits = (block["signs"][..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & np.uint32(127)).astype(np.uint8)
    points = grid("IQ3_XXS")[block["qs"]].reshape(-1, 8, 32) * signs(with_parity(bits)).reshape(-1, 8, 32)
    scales = ((block["signs"] >> np.uint32(28)).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return scale_groups(float_scales(block["d"], scales), points)


def dequantize_iq3_s(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 110) bytes to (n, 256) weights `sign * d * (2 * scale + 1) * coordinate`, in groups of 4.

    An index has 9 bits, of which `qh` has the highest. Each weight has a sign bit. Every 32 weights share a 4-bit
    scale.
    """
    block = blocks.view(layout.IQ3_S)[:, 0]
    high = np.unpackbits(block["qh"], axis=1, bitorder="little").astype(np.uint16)
    points = grid("IQ3_S")[block["qs"] | high << np.uint16(8)].reshape(-1, 8, 32)
    scales = 2 * bit_fields(block["scales"][..., None], 4).reshape(-1, 8).astype(np.float32) + 1
    return scale_groups(float_scales(block["d"], scales), points * signs(block["signs"]).reshape(-1, 8, 32))


# The 16 levels of IQ4, which are closer together around 0.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def dequantize_iq4_nl(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 18) bytes to (n, 32) weights `d * level`.

    The low four bits of the bytes `qs` have the first 16 weights, the high four bits the last 16.
    """
    block = blocks.view(layout.IQ4_NL)[:, 0]
    with np.errstate(invalid="ignore"):  # NumPy warns of a scale that is a signalling NaN
        scales = block["d"].astype(np.float32)[:, None]
    return scale_groups(scales, IQ4_LEVELS[bit_fields(block["qs"], 4)])


def dequantize_iq4_xs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 136) bytes to (n, 256) weights `d * (scale - 32) * level`, in 8 groups of 32.

    A scale has 6 bits: the low four are in `scales_l`, the high two in `scales_h`. Every 16 bytes of `qs`
    contain a group: its first 16 weights in the low four bits of the bytes, its last 16 in the high four.
    """
    block = blocks.view(layout.IQ4_XS)[:, 0]
    low = bit_fields(block["scales_l"][..., None], 4).reshape(-1, 8)
    high = (block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    return scale_groups(float_scales(block["d"], scales), IQ4_LEVELS[bit_fields(block["qs"].reshape(-1, 8, 16), 4)])


_TERNARY, _IQ2, _IQ3 = (-1, 0, 1), (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
# For each grid, in the order of `grids.bin`: the number of coordinates of a point, and the levels of a coordinate.
_GRIDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "IQ1": (8, _TERNARY),
    "IQ2_XXS": (8, _IQ2),
    "IQ2_XS": (8, _IQ2),
    "IQ2_S": (8, _IQ2),
    "IQ3_XXS": (4, _IQ3),
    "IQ3_S": (4, (1, 3, 5, 7, 9, 11, 13, 15)),
}


@cache
def grid(name: str) -> NDArray[np.float32]:
    """Return the points of a grid, a read-only array (number of points, coordinates)."""
    numbers = np.flatnonzero(np.unpackbits(_bitmaps()[name], bitorder="little"))
    size, levels = _GRIDS[name]
    digits = numbers[:, None] // len(levels) ** np.arange(size) % len(levels)
    points: NDArray[np.float32] = np.array(levels, dtype=np.float32)[digits]
    points.flags.writeable = False
    return points


@cache
def _bitmaps() -> dict[str, NDArray[np.uint8]]:
    data = np.frombuffer(resources.files(__package__).joinpath("grids.bin").read_bytes(), dtype=np.uint8)
    sizes = [-(-(len(levels) ** size) // 8) for size, levels in _GRIDS.values()]
    return dict(zip(_GRIDS, np.split(data, np.cumsum(sizes)[:-1]), strict=True))


def signs(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return (n, k, 8) signs from the bits of (n, k) bytes, lowest bit first: 1 for a bit of 0, -1 for a bit of 1."""
    return 1 - 2 * np.unpackbits(bits[..., None], axis=-1, bitorder="little").astype(np.float32)


def with_parity(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Set bit 7, which IQ2_XXS, IQ2_XS and IQ3_XXS do not store, so that the number of ones is even."""
    folded = bits ^ bits >> np.uint8(4)
    folded ^= folded >> np.uint8(2)
    folded ^= folded >> np.uint8(1)
    return bits | folded << np.uint8(7)


# Twice the value of each 4-bit E2M1 quant of MXFP4 and NVFP4, so that the values are whole numbers. To compensate, the
# tables below have half of each scale. As in ggml, the quant of -0 has the value 0.
LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
# Half of the scale 2 ** (e - 127) of MXFP4, for every byte e.
HALF_POWERS = np.ldexp(np.float32(1), np.arange(256) - 128)


def _half_e4m3() -> NDArray[np.float32]:
    """Return half the value of each byte as an E4M3 scale.

    As in ggml, the sign bit is ignored, and byte 127 (NaN in E4M3) gives 0. Byte 255 (also NaN) gives 240.
    """
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, (codes & 7).astype(np.float32)
    significands = np.where(exponents, 8 + mantissas, mantissas)
    values: NDArray[np.float32] = np.ldexp(significands.astype(np.float32), np.maximum(exponents, 1) - 11)
    values[127] = 0
    return values


_HALF_SCALES = _half_e4m3()


def dequantize_mxfp4(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 17) bytes of MXFP4 to (n, 32) weights."""
    block = blocks.view(layout.MXFP4)[:, 0]
    return scale_groups(HALF_POWERS[block["e"]][:, None], LEVELS[bit_fields(block["qs"], 4)])


def dequantize_nvfp4(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 36) bytes of NVFP4 to (n, 64) weights."""
    block = blocks.view(layout.NVFP4)[:, 0]
    return scale_groups(_HALF_SCALES[block["scales"]], LEVELS[bit_fields(block["qs"], 4)])


def dequantize_tq1_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 54) bytes of TQ1_0 to (n, 256) weights."""
    block = blocks.view(layout.TQ1_0)[:, 0]
    parts = [_digits(block["qs"][:, :32], 5), _digits(block["qs"][:, 32:], 5), _digits(block["qh"], 4)]
    return _trits(block["d"], np.concatenate(parts, axis=1))


def dequantize_tq2_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 66) bytes of TQ2_0 to (n, 256) weights."""
    block = blocks.view(layout.TQ2_0)[:, 0]
    return _trits(block["d"], bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 256))


def _digits(packed: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    """Unpack n base-3 digits of each of (m, k) bytes to (m, n * k): the first digits of all k bytes, then the second.

    The digits of a byte b are the first base-3 digits of the fraction b / 256. So digit j is
    `(b * 3**j % 256) * 3 // 256`.
    """
    rests = packed[:, None] * np.array([3**j for j in range(n)], dtype=np.uint8)[:, None]  # modulo 256
    return (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)


def _trits(scale: NDArray[np.float16], quants: NDArray[np.uint8]) -> NDArray[np.float32]:
    return float_scales(scale, quants.astype(np.float32) - np.float32(1))
