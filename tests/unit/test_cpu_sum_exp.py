"""The compiled sum of exponentials against its NumPy twin, to the bit, and both against exact arithmetic."""

from __future__ import annotations

import ctypes
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

pytest.importorskip("numba")

from kernels.cpu.build import library
from kernels.cpu.products.order_numpy import LEAST, _halves, exp, sum_exp

# Rows with and without a last vector that is not full, and one that is longer than a step of the twin.
LENGTHS = [1, 2, 15, 16, 17, 31, 100, 2048, 8191, 8192, 8193, 20_011]


def compiled(row: np.ndarray, top: float) -> float:
    out = ctypes.c_double()
    library.load().sum_exp(row.ctypes.data, len(row), top, ctypes.addressof(out))
    return out.value


def normal(n: int, scale: float = 4.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed + n).standard_normal(n) * scale).astype(np.float32)


def test_the_twin_has_the_bits_of_the_kernel():
    rows = [normal(n, scale) for n in LENGTHS for scale in (0.01, 1.0, 12.0, 400.0)]
    assert [compiled(row, float(row.max())) for row in rows] == [sum_exp(row, float(row.max())) for row in rows]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, -3e38, 88.0])
def test_equal_logits_count_as_one_each(value: float):
    row = np.full(100, value, dtype=np.float32)
    assert compiled(row, float(row[0])) == sum_exp(row, float(row[0])) == 100


def test_logits_far_below_the_largest_add_nothing():
    row = np.array([5.0, -3e38, -np.inf, 5.0 - 800, -1e9], dtype=np.float32)
    assert compiled(row, 5.0) == sum_exp(row, 5.0) == 1


def test_what_is_no_number_is_not_hidden():
    row = normal(50)
    row[20] = np.nan
    assert math.isnan(compiled(row, float(row.max())))
    assert math.isnan(sum_exp(row, float(row.max())))


def test_the_exponential_is_exact_to_twelve_digits():
    x = np.concatenate([-np.geomspace(1e-12, 699, 400), np.linspace(-3, 0, 400)])
    with localcontext(prec=30):
        want = [Decimal(v).exp() for v in x.tolist()]
        errors = [abs(Decimal(found) / exact - 1) for found, exact in zip(exp(x).tolist(), want, strict=True)]
    assert max(errors) < 1e-12
    assert exp(np.array([0.0, LEAST - 50])).tolist() == [1.0, exp(np.array([LEAST])).tolist()[0]]


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_the_sum_is_exact_to_twelve_digits(scale: float):
    row = normal(20_011, scale)
    top = float(row.max())
    exact = math.fsum(np.exp(row.astype(np.float64) - top).tolist())
    assert sum_exp(row, top) == pytest.approx(exact, rel=1e-12)


def test_the_order_is_by_lane_then_halves():
    """A sum in another order, such as NumPy's, has other bits for some row."""
    rows = [normal(n) for n in LENGTHS]
    terms = [exp(np.pad(row.astype(np.float64) - row.max(), (0, -len(row) % 16), constant_values=-800)) for row in rows]
    by_lane = []
    for of_row in terms:
        lanes = np.zeros(16)
        for first in range(0, len(of_row), 16):
            lanes = lanes + of_row[first : first + 16]
        by_lane.append(_halves(lanes))
    found = [compiled(row, float(row.max())) for row in rows]
    assert found == by_lane
    assert found != [float(of_row.sum()) for of_row in terms]
