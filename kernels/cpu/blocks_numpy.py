"""The NumPy twins of the kernels that expand blocks: one function per format, which returns the exact weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def q8_0(blocks: Bytes) -> Floats:
    """`d * q`, (n, 32)."""
    found = blocks.view(layout.Q8_0)
    return found["d"].astype(np.float32)[:, None] * found["qs"].astype(np.float32)


def q4_0(blocks: Bytes) -> Floats:
    """`d * (q - 8)`, (n, 32)."""
    found = blocks.view(layout.Q4_0)
    return found["d"].astype(np.float32)[:, None] * (_halves(found["qs"]) - np.float32(8))


def q4_1(blocks: Bytes) -> Floats:
    """`d * q + m`, (n, 32)."""
    found = blocks.view(layout.Q4_1)
    scales, minima = found["d"].astype(np.float32), found["m"].astype(np.float32)
    return scales[:, None] * _halves(found["qs"]) + minima[:, None]


def q4_k(blocks: Bytes) -> Floats:
    """`(d * scale) * q - dmin * minimum`, (n, 256)."""
    found = blocks.view(layout.Q4_K)
    first, second, third = np.split(found["scales"], 3, axis=1)
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1).astype(np.float32)
    scales *= found["d"].astype(np.float32)[:, None]
    minima *= found["dmin"].astype(np.float32)[:, None]
    quants = _halves(found["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    return (scales[..., None] * quants - minima[..., None]).reshape(-1, 256)


def q6_k(blocks: Bytes) -> Floats:
    """`(d * scale) * (q - 32)`, (n, 256)."""
    found = blocks.view(layout.Q6_K)
    low = _halves(found["ql"].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = found["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3
    quants = low + np.float32(16) * high.astype(np.float32) - np.float32(32)
    scales = found["scales"].astype(np.float32) * found["d"].astype(np.float32)[:, None]
    return (scales[..., None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


def _halves(packed: Bytes) -> Floats:
    """Return 4-bit quants as floats: the low halves of a row of bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def affine(blocks: Bytes, bits: int, size: int, scale: str) -> Floats:
    """`scale * q + bias`, product and sum each rounded, (n, size); `scale` is the type of both, such as "bf16"."""
    found = blocks.view(layout.group(size, bits, scale.upper(), has_biases=True))
    single = np.unpackbits(found["qs"], axis=-1, bitorder="little").reshape(len(blocks), size, bits)
    quants = np.packbits(single, axis=-1, bitorder="little")[..., 0].astype(np.float32)
    scales, biases = (_widened(np.ascontiguousarray(found[field]).reshape(-1, 1)) for field in ("d", "m"))
    return scales * quants + biases


def _widened(values: NDArray[np.generic]) -> Floats:
    """Return floats as float32; uint16 are the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
