"""The NumPy twin of `sum_exp.py`, with the same bits, and the constants of both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..build.layout import LANES

# e**LEAST replaces smaller exponentials, which would be subnormal numbers.
LEAST = -700.0
LOG2_E = 1.4426950408889634
# A float64 of this size has no fraction: adding it rounds to an integer, which the low bits of the sum then hold.
ROUNDER = 1.5 * 2.0**52

# 2**r is the Taylor polynomial of degree 6 of 2**(r / 8), squared three times: its relative error is below 5e-13.
SQUARINGS = 3


def _taylor(degree: int) -> tuple[float, ...]:
    # By multiplications and divisions alone: the C library's pow may round differently on another system.
    found = [1.0]
    for k in range(1, degree + 1):
        found.append(found[-1] * (0.6931471805599453 / 2**SQUARINGS) / k)
    return tuple(found)


COEFFICIENTS = _taylor(6)

# Elements per step, so that temporary arrays fit into the second-level cache.
_STEP = 512 * LANES

Doubles = NDArray[np.float64]


def exp(x: Doubles) -> Doubles:
    """Return `e**x` for x <= 0, with a relative error below 1e-12; exactly 1 for 0, and `e**LEAST` below LEAST."""
    x = np.maximum(x, LEAST) * LOG2_E
    n = x + ROUNDER
    r = x - (n - ROUNDER)
    p = COEFFICIENTS[-1] * r
    for c in COEFFICIENTS[-2:0:-1]:
        p = (p + c) * r
    p += COEFFICIENTS[0]
    for _ in range(SQUARINGS):
        p *= p
    return np.asarray((p.view(np.int64) + (n.view(np.int64) << 52)).view(np.float64))


def sum_exp(row: NDArray[np.float32], top: float) -> float:
    """Return `sum(exp(row - top))` of (V,) logits, whose largest is `top`, in float64."""
    sums = np.zeros(LANES)
    for first in range(0, len(row), _STEP):
        part = row[first : first + _STEP]
        # Lanes without an element add e**LEAST, which is below a unit in the last place of the total, which is >= 1.
        padded = np.pad(part.astype(np.float64), (0, -len(part) % LANES), constant_values=-np.inf)
        terms = exp(padded - top).reshape(-1, LANES)
        terms[0] += sums
        sums = np.add.accumulate(terms)[-1]  # in the order of the rows; `sum` does not promise an order
    return _halves(sums)


def _halves(sums: Doubles) -> float:
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return float(sums[0])
