"""The NumPy twins of the compiled norms and rotation, in the precision of their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def rms_norm(x: Floats, at: int, n: int, weight: Floats, eps: float, out: Floats, to: int) -> None:
    """`out[to ...] = weight * x[at ...] / sqrt(mean(x**2) + eps)` over `n` elements; out may be x."""
    row = x[at : at + n]
    out[to : to + n] = weight * (row / np.sqrt(np.mean(np.square(row)) + eps))


def layer_norm(x: Floats, at: int, n: int, weight: Floats, bias: Floats, eps: float, out: Floats, to: int) -> None:
    """`out[to ...] = weight * (x[at ...] - mean) / sqrt(variance + eps) + bias` over `n` elements; out may be x."""
    centered = x[at : at + n] - np.mean(x[at : at + n])
    out[to : to + n] = weight * (centered / np.sqrt(np.mean(np.square(centered)) + eps)) + bias


def rotate(x: Floats, at: int, half: int, cos: Floats, sin: Floats, row: int, out: Floats, to: int) -> None:
    """Rotate pairs (j, j + half) by the angles whose cosines begin at `cos[row]`, sines at `sin[row]`; out may be x."""
    a, b = x[at : at + 2 * half].reshape(2, half).copy()
    c, s = cos[row : row + half], sin[row : row + half]
    out[to : to + half] = a * c - b * s
    out[to + half : to + 2 * half] = b * c + a * s
