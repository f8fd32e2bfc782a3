"""float32 products and packed tiles against their NumPy twins and against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu import float32, float32_numpy, gemm, gemm_numpy

# Half a unit in the last place, relative: what one rounding of a float32 costs.
U = 2.0**-24


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 200))
def test_products_of_rows_of_any_length(seed: int, n_rows: int, n: int):
    rng = np.random.default_rng(seed)
    weights, x = normal(rng, n_rows, n), normal(rng, n)
    terms = weights.astype(np.float64) * x
    for kernels in (float32, float32_numpy):
        y = np.full(n_rows, np.nan, dtype=np.float32)
        kernels.matvec(weights.reshape(-1), n, x, y, 0, n_rows)
        # No sum has more than n roundings, whichever order the terms are added in; as many more for the products.
        assert (np.abs(y - terms.sum(axis=1)) <= 2 * n * U * np.abs(terms).sum(axis=1)).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(1, 70), rows=st.tuples(*[st.integers(0, 8)] * 4),
    at=st.integers(0, 2), apart=st.integers(1, 3),
)  # fmt: skip
def test_four_rows_from_anywhere(seed: int, n: int, rows: tuple[int, int, int, int], at: int, apart: int):
    rng = np.random.default_rng(seed)
    weights, x = normal(rng, 9, n), normal(rng, n)
    terms = weights[list(rows)].astype(np.float64) * x
    for kernels in (float32, float32_numpy):
        y = np.full(12, np.nan, dtype=np.float32)
        # From where a row begins to the end of the matrix, as a kernel gets it.
        kernels.four_rows(*[weights.reshape(-1)[row * n :] for row in rows], n, x, y, at, apart)
        written = at + apart * np.arange(4)
        assert (np.abs(y[written] - terms.sum(axis=1)) <= 2 * n * U * np.abs(terms).sum(axis=1)).all()
        assert np.isnan(np.delete(y, written)).all()


@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 5), (6, 7), (3, 3)])
def test_only_the_rows_asked_for_are_written(first: int, last: int):
    weights, x = np.arange(7 * 40, dtype=np.float32), np.ones(40, dtype=np.float32)
    y = np.full(7, np.nan, dtype=np.float32)
    float32.matvec(weights, 40, x, y, first, last)
    np.testing.assert_array_equal(y[first:last], weights.reshape(7, 40).sum(axis=1)[first:last])
    assert np.isnan(np.delete(y, range(first, last))).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), n_rows=st.integers(1, 20), n=st.integers(1, 70), transposed=st.booleans(),
    gap=st.integers(0, 3), shift=st.integers(0, 3),
)  # fmt: skip
def test_tiles_of_any_height(seed: int, n_rows: int, n: int, transposed: bool, gap: int, shift: int):
    """Rows that lie behind each other, or columns that do, with something between them, from anywhere on."""
    rng = np.random.default_rng(seed)
    row, step = (1, n_rows + gap) if transposed else (n + gap, 1)
    a, b = normal(rng, shift + (n + gap) * (n_rows + gap)), normal(rng, shift + 16 * n)
    before = normal(rng, shift + 16 * n_rows + 16)
    found, want, size = before.copy(), before.astype(np.float64), np.abs(before.astype(np.float64))
    gemm.multiply_add(a, shift, row, step, n_rows, b, shift, found, shift, n)
    wide = a.astype(np.float64), b.astype(np.float64)
    gemm_numpy.multiply_add(wide[0], shift, row, step, n_rows, wide[1], shift, want, shift, n)
    gemm_numpy.multiply_add(abs(wide[0]), shift, row, step, n_rows, abs(wide[1]), shift, size, shift, n)
    # n fused roundings, and one for adding to what was there; none where nothing is written.
    assert (np.abs(found - want) <= (n + 1) * U * size).all()
    np.testing.assert_array_equal(found[:shift], before[:shift])
    np.testing.assert_array_equal(found[shift + 16 * n_rows :], before[shift + 16 * n_rows :])


@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 17, 48])
def test_a_tiles_result_does_not_depend_on_the_rows_beside_it(n_rows: int):
    """Bit for bit: the tiles of 6 rows, of 2 and of 1 add in the same order."""
    rng = np.random.default_rng(n_rows)
    a, b = normal(rng, n_rows * 33), normal(rng, 33 * 16)
    together, alone = (np.zeros(16 * n_rows, dtype=np.float32) for _ in range(2))
    gemm.multiply_add(a, 0, 33, 1, n_rows, b, 0, together, 0, 33)
    for r in range(n_rows):
        gemm.multiply_add(a, r * 33, 33, 1, 1, b, 0, alone, 16 * r, 33)
    np.testing.assert_array_equal(together, alone)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), n_rows=st.integers(0, 16), n=st.integers(1, 200), gap=st.integers(0, 3),
    to=st.integers(0, 3), factor=st.sampled_from([1.0, 0.125, -0.3]),
)  # fmt: skip
def test_packed_panels_are_those_of_the_twin(seed: int, n_rows: int, n: int, gap: int, to: int, factor: float):
    x = normal(np.random.default_rng(seed), 2 + 16 * (n + gap))
    found, want = (np.full(to + 16 * n + 5, np.nan, dtype=np.float32) for _ in range(2))
    gemm.pack(x, 2, n + gap, n_rows, n, np.float32(factor), found, to)
    gemm_numpy.pack(x, 2, n + gap, n_rows, n, np.float32(factor), want, to)
    np.testing.assert_array_equal(found, want)
