"""NumPy references of the kernels that unpack blocks: scales, quants, offsets and weights of each format."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import blocks as layout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Parts(NamedTuple):
    """Weights of n blocks as `scale * quant + offset`, in groups of weights that share a scale.

    Attributes:
        scales: (n, groups).
        quants: (n, groups, columns of a group), integers as float32.
        offsets: (n, groups), or None if the format has none.
    """

    scales: Floats
    quants: Floats
    offsets: Floats | None = None


class Reference:
    """The reference of a format, made by decorating the function `parts` that unpacks the format's blocks.

    The docstring of `parts` has the formula and the shape of the weights. In the formulas, q is a quant, and d, dmin,
    m and e are fields of the block. In K-quants and IQ4_XS, `scale` and `minimum` are integers of a sub-block. `level`
    is the number to which a table below maps the quant.
    """

    def __init__(self, parts: Callable[..., Parts]) -> None:
        self.parts, self.__doc__ = parts, parts.__doc__

    def __call__(self, blocks: Bytes, *options: int | str) -> Floats:
        """Return the weights of n blocks, (n, weights of a block).

        `blocks` is (n, bytes of a block). `options` are the other arguments of `affine`; other formats have none.
        """
        found = self.parts(blocks, *options)
        products = found.scales[..., None] * found.quants
        weights = products if found.offsets is None else products + found.offsets[..., None]
        return np.asarray(weights.reshape(len(weights), -1), dtype=np.float32)


@Reference
def q8_0(blocks: Bytes) -> Parts:
    """`d * q`, (n, 32)."""
    found = blocks.view(layout.Q8_0)
    return Parts(found["d"].astype(np.float32)[:, None], found["qs"].astype(np.float32)[:, None])


@Reference
def q4_0(blocks: Bytes) -> Parts:
    """`d * (q - 8)`, (n, 32)."""
    found = blocks.view(layout.Q4_0)
    return Parts(found["d"].astype(np.float32)[:, None], _halves(found["qs"])[:, None] - np.float32(8))


@Reference
def q4_1(blocks: Bytes) -> Parts:
    """`d * q + m`, (n, 32)."""
    found = blocks.view(layout.Q4_1)
    return Parts(
        found["d"].astype(np.float32)[:, None], _halves(found["qs"])[:, None], found["m"].astype(np.float32)[:, None]
    )


@Reference
def q4_k(blocks: Bytes) -> Parts:
    """`(d * scale) * q - dmin * minimum`, (n, 256)."""
    found = blocks.view(layout.Q4_K)
    scales, minima = _scales_of_6(found)
    quants = _halves(found["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    return Parts(scales, quants, -minima)


@Reference
def q6_k(blocks: Bytes) -> Parts:
    """`(d * scale) * (q - 32)`, (n, 256)."""
    found = blocks.view(layout.Q6_K)
    low = _halves(found["ql"].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = found["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3
    quants = low + np.float32(16) * high.astype(np.float32) - np.float32(32)
    scales = found["scales"].astype(np.float32) * found["d"].astype(np.float32)[:, None]
    return Parts(scales, quants.reshape(-1, 16, 16))


@Reference
def q5_0(blocks: Bytes) -> Parts:
    """`d * (q - 16)`, (n, 32)."""
    found = blocks.view(layout.Q5_0)
    return Parts(found["d"].astype(np.float32)[:, None], _five_bits(found)[:, None] - np.float32(16))


@Reference
def q5_1(blocks: Bytes) -> Parts:
    """`d * q + m`, (n, 32)."""
    found = blocks.view(layout.Q5_1)
    return Parts(
        found["d"].astype(np.float32)[:, None], _five_bits(found)[:, None], found["m"].astype(np.float32)[:, None]
    )


@Reference
def q5_k(blocks: Bytes) -> Parts:
    """`(d * scale) * q - dmin * minimum`, (n, 256)."""
    found = blocks.view(layout.Q5_K)
    low = _halves(found["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    fifth = found["qh"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    scales, minima = _scales_of_6(found)
    return Parts(scales, low + np.float32(16) * fifth, -minima)


@Reference
def q2_k(blocks: Bytes) -> Parts:
    """`(d * scale) * q - dmin * minimum`, (n, 256)."""
    found = blocks.view(layout.Q2_K)
    scales = found["d"].astype(np.float32)[:, None] * (found["scales"] & 15).astype(np.float32)
    minima = found["dmin"].astype(np.float32)[:, None] * (found["scales"] >> 4).astype(np.float32)
    return Parts(scales, _two_bits(found), -minima)


@Reference
def q3_k(blocks: Bytes) -> Parts:
    """`(d * (scale - 32)) * (q - 4)`, (n, 256)."""
    found = blocks.view(layout.Q3_K)
    third = found["hmask"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    quants = _two_bits(found) + np.float32(4) * third.reshape(-1, 16, 16) - np.float32(4)
    low, high = _halves(found["scales"][:, :8]), found["scales"][:, None, 8:] >> np.arange(0, 8, 2)[:, None] & 3
    scales = found["d"].astype(np.float32)[:, None] * (low + 16 * high.reshape(-1, 16).astype(np.float32) - 32)
    return Parts(scales, quants)


# Map a 4-bit quant to its level, the integer that the scale multiplies: _IQ4 for IQ4_NL and IQ4_XS, _E2M1 for MXFP4.
# The levels of MXFP4 are twice the values of the number format E2M1, which has halves.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


@Reference
def iq4_nl(blocks: Bytes) -> Parts:
    """`d * level`, (n, 32)."""
    found = blocks.view(layout.IQ4_NL)
    return Parts(found["d"].astype(np.float32)[:, None], _IQ4[_halves(found["qs"]).astype(np.int64)][:, None])


@Reference
def iq4_xs(blocks: Bytes) -> Parts:
    """`(d * (scale - 32)) * level`, (n, 256)."""
    found = blocks.view(layout.IQ4_XS)
    low = np.stack([found["scales_l"] & 15, found["scales_l"] >> 4], axis=2).reshape(-1, 8)
    high = found["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = found["d"].astype(np.float32)[:, None] * (low.astype(np.float32) + 16 * high.astype(np.float32) - 32)
    levels = _IQ4[_halves(found["qs"].reshape(-1, 16)).astype(np.int64)].reshape(-1, 8, 32)
    return Parts(scales, levels)


@Reference
def mxfp4(blocks: Bytes) -> Parts:
    """`2 ** (e - 128) * level`, (n, 32)."""
    found = blocks.view(layout.MXFP4)
    scales = np.ldexp(np.float32(1), found["e"].astype(np.int32) - 128)
    return Parts(scales[:, None], _E2M1[_halves(found["qs"]).astype(np.int64)][:, None])


def _five_bits(found: NDArray[np.void]) -> Floats:
    """Return the 5-bit quants of Q5_0 or Q5_1 blocks, (n, 32)."""
    high = np.unpackbits(found["qh"], axis=1, bitorder="little")
    return _halves(found["qs"]) + np.float32(16) * high


def _two_bits(found: NDArray[np.void]) -> Floats:
    """Return the low 2 bits of the quants of Q2_K or Q3_K blocks, (n, 16, 16)."""
    fields = found["qs"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3
    return fields.reshape(-1, 16, 16).astype(np.float32)


def _scales_of_6(found: NDArray[np.void]) -> tuple[Floats, Floats]:
    """Return the scales `d * scale` and the minima `dmin * minimum` of Q4_K or Q5_K blocks, (n, 8) each."""
    first, second, third = np.split(found["scales"], 3, axis=1)
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1).astype(np.float32)
    return scales * found["d"].astype(np.float32)[:, None], minima * found["dmin"].astype(np.float32)[:, None]


def _halves(packed: Bytes) -> Floats:
    """Unpack bytes (n, m) to 4-bit quants (n, 2 m) as floats: the low four bits of a row, then its high four bits."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


@Reference
def affine(blocks: Bytes, bits: int, size: int, scale_type: str) -> Parts:
    """`scale * q + bias`, (n, size); the product and the sum are each rounded to float32.

    `size` is the number of weights of a block, and `scale_type` the type of scales and biases, such as "bf16".
    """
    found = blocks.view(layout.group(size, bits, scale_type.upper(), has_biases=True))
    if bits == 4:
        quants = _halves(found["qs"].reshape(-1, 16)).reshape(len(blocks), size)
    else:
        single = np.unpackbits(found["qs"], axis=-1, bitorder="little").reshape(len(blocks), size, bits)
        quants = np.packbits(single, axis=-1, bitorder="little")[..., 0].astype(np.float32)
    scales, biases = (_widened(np.ascontiguousarray(found[field]).reshape(-1, 1)) for field in ("d", "m"))
    return Parts(scales, quants[:, None], biases)


def _widened(values: NDArray[np.generic]) -> Floats:
    """Convert float16, float32, or the bits of bfloat16 as uint16, to float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
