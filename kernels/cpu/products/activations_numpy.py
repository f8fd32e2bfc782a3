"""The NumPy twins of the compiled activations, in the precision of their arrays."""

from __future__ import annotations

import numpy as np

from .norms_numpy import Floats


def silu(x: Floats) -> Floats:
    """`x / (1 + exp(-x))`; where the exponential overflows, x / infinity is the right answer: 0."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Floats) -> Floats:
    """`0.5 x (1 + tanh(u))` with `u = sqrt(2/pi) (x + 0.044715 x**3)`, written as `x / (1 + exp(-2 u))`."""
    with np.errstate(over="ignore"):
        u = float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)
        return np.asarray(x / (1 + np.exp(-2 * u)))
