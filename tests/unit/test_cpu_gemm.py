"""Register tiles against the order of summation in NumPy, bit for bit, and against float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.build.jit import jit
from kernels.cpu.build.layout import STRETCH, TILE_ROWS
from kernels.cpu.build.vectors import PART
from kernels.cpu.products import order_numpy, tile

# Half a unit in the last place, relative: what one rounding of a float32 costs.
U = 2.0**-24


@jit
def most_vectors() -> int:
    return tile.tile_vectors()


VECTORS = most_vectors()

seeds = st.integers(0, 2**32 - 1)
# Columns in whole vectors: odd and even numbers of them, and a whole stretch.
columns = st.one_of(st.integers(1, 9), st.sampled_from([STRETCH // 16 - 1, STRETCH // 16])).map(lambda n: 16 * n)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def rows_at(a: np.ndarray, at: int, row: int, n_rows: int, n: int) -> np.ndarray:
    """Return rows of n elements that are `row` elements apart, the first at element `at`."""
    return np.stack([a[at + r * row : at + r * row + n] for r in range(n_rows)])


def in_parts(rows: np.ndarray) -> np.ndarray:
    """Return rows in parts: the first PART elements of each 16, then the next ones."""
    return rows.reshape(len(rows), -1, 16 // PART, PART).swapaxes(1, 2).reshape(rows.shape)


def test_a_tile_has_as_many_vectors_as_fit_into_registers():
    assert VECTORS in (3, 6)
    assert VECTORS <= tile.MOST_VECTORS


@settings(max_examples=60)
@given(
    seed=seeds, n_vectors=st.integers(1, VECTORS), n=columns, offsets=st.tuples(*[st.integers(0, 3)] * 3),
    gaps=st.tuples(*[st.integers(0, 5)] * 3), one_row=st.booleans(),
)  # fmt: skip
def test_dot_products_are_summed_in_the_order_that_numpy_defines(
    seed: int, n_vectors: int, n: int, offsets: tuple[int, int, int], gaps: tuple[int, int, int], one_row: bool
):
    """With other values between rows and after the last one; only the totals are written."""
    rng = np.random.default_rng(seed)
    w_row, x_row, y_row = 0 if one_row else n + gaps[0], n + gaps[1], TILE_ROWS + gaps[2]
    w, x = normal(rng, offsets[0] + 3 * w_row + n), normal(rng, offsets[1] + VECTORS * x_row)
    before = normal(rng, offsets[2] + VECTORS * y_row)
    weights = rows_at(w, offsets[0], w_row, TILE_ROWS, n)
    vectors = rows_at(x, offsets[1], x_row, n_vectors, n)
    dots = order_numpy.dot(weights, vectors[:, None])
    places = offsets[2] + y_row * np.arange(n_vectors)[:, None] + np.arange(TILE_ROWS)
    terms = vectors[:, None].astype(np.float64) * weights
    # 64 sums at most in a lane, four to join the lanes.
    assert (np.abs(dots - terms.sum(axis=-1)) <= (n // 16 + 5) * U * np.abs(terms).sum(axis=-1)).all()
    expanded, packed = w.copy(), x.copy()
    for r, row in enumerate(in_parts(weights)):
        expanded[offsets[0] + r * w_row :][:n] = row
    for t, row in enumerate(in_parts(vectors)):
        packed[offsets[1] + t * x_row :][:n] = row
    set_y, add_y, kept = before.copy(), before.copy(), np.full(tile.KEPT, np.nan, dtype=np.float32)
    tile.set_dots(w, offsets[0], w_row, x, offsets[1], x_row, n_vectors, n, set_y, offsets[2], y_row)
    size = n // (16 // PART)
    for first in range(0, n, size):
        at, kernel = (offsets[0] + first, offsets[1] + first), tile.keep_dots if first + size < n else tile.add_dots
        y = (add_y, offsets[2], y_row) if kernel is tile.add_dots else ()
        kernel(expanded, at[0], w_row, packed, at[1], x_row, n_vectors, n, kept, 0, *y)
    for y, want in ((set_y, dots), (add_y, before[places] + dots)):
        np.testing.assert_array_equal(y[places], want)
        np.testing.assert_array_equal(np.delete(y, places), np.delete(before, places))


@settings(max_examples=60)
@given(
    seed=seeds, n_sums=st.integers(1, VECTORS), n=st.integers(0, 130), width=st.integers(1, 18).map(lambda n: 16 * n),
    offsets=st.tuples(*[st.integers(0, 3)] * 3), gaps=st.tuples(*[st.integers(0, 5)] * 3), begun=st.integers(0, 130),
)  # fmt: skip
def test_weighted_rows_are_summed_in_their_order(
    seed: int, n_sums: int, n: int, width: int, offsets: tuple[int, int, int], gaps: tuple[int, int, int], begun: int
):
    """In one call, or in two calls, the second of which continues the sums, as for rows of two pages."""
    rng = np.random.default_rng(seed)
    w_row, row, y_row = n + gaps[0], width + gaps[1], width + gaps[2]
    w, rows = normal(rng, offsets[0] + VECTORS * w_row), normal(rng, offsets[1] + n * row)
    before = normal(rng, offsets[2] + VECTORS * y_row)
    weights = rows_at(w, offsets[0], w_row, n_sums, n)
    values = rows_at(rows, offsets[1], row, n, width) if n else np.zeros((0, width), dtype=np.float32)
    want = order_numpy.sum_weighted(weights, values)
    terms = weights[..., None].astype(np.float64) * values
    assert (np.abs(want - terms.sum(axis=1)) <= n * U * np.abs(terms).sum(axis=1)).all()
    y = before.copy()
    for first, last in ((0, min(begun, n)), (min(begun, n), n)):
        if last > first or not first:
            tile.sum_weighted(
                w, offsets[0] + first, w_row, n_sums, rows, offsets[1] + first * row, row, last - first, width, y,
                offsets[2], y_row, first,
            )  # fmt: skip
    places = offsets[2] + y_row * np.arange(n_sums)[:, None] + np.arange(width)
    np.testing.assert_array_equal(y[places], want)
    np.testing.assert_array_equal(np.delete(y, places), np.delete(before, places))


def test_the_order_can_be_seen():
    """Values whose sum differs in nearly every other order."""
    rng = np.random.default_rng(1)
    w, x = normal(rng, 64, 512), normal(rng, 512)
    found = order_numpy.dot(w, x)
    for other in (w @ x, (w * x).sum(axis=1), order_numpy.dot(w[:, ::-1], x[::-1]), order_numpy.halves(w * x)):
        assert np.count_nonzero(found != other) > 32


@settings(max_examples=40)
@given(*[st.floats(-(2.0**20), 2.0**20, width=32)] * 3)
def test_a_multiply_add_is_rounded_once(a: float, b: float, c: float):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    found = order_numpy.fma(*(np.float32(value) for value in (a, b, c)))
    off = abs(Fraction(float(found)) - exact)
    for neighbor in (np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))):
        assert off <= abs(Fraction(float(neighbor)) - exact)


def test_a_multiply_add_just_below_the_middle_of_two_numbers_is_rounded_down():
    """float64 represents the midpoint but not the sum: two roundings would round up."""
    a, b = np.float32(2.0**-12 * (1 + 2.0**-18)), np.float32(2.0**-12 * (1 - 2.0**-18))
    c = np.float32(1 + 2.0**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == np.float32(1 + 2.0**-22)
    assert order_numpy.fma(a, b, c) == c
