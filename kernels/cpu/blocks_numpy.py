"""The NumPy twins of the compiled kernels for codes of 4 and 6 bits: what the bytes mean, and products with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout

Bytes, Floats = NDArray[np.uint8], NDArray[np.float32]


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
    codes = _halves(found["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    return (scales[..., None] * codes - minima[..., None]).reshape(-1, 256)


def q6_k(blocks: Bytes) -> Floats:
    """`(d * scale) * (q - 32)`, (n, 256)."""
    found = blocks.view(layout.Q6_K)
    low = _halves(found["ql"].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = found["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3
    codes = low + np.float32(16) * high.astype(np.float32) - np.float32(32)
    scales = found["scales"].astype(np.float32) * found["d"].astype(np.float32)[:, None]
    return (scales[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def matvec(expand: Callable[[Bytes], Floats], blocks: Bytes, x: Floats, y: Floats, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1, by one of the functions above."""
    y[first:last] = expand(blocks).reshape(-1, x.size)[first:last] @ x


def _halves(packed: Bytes) -> Floats:
    """Codes of 4 bits as floats: the low halves of a row of bytes, then its high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
