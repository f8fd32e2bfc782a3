"""Register tiles against the order of summation in NumPy, bit for bit, and against float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.attention import stored
from kernels.cpu.build import layout
from kernels.cpu.build.jit import jit
from kernels.cpu.build.layout import STRETCH, TILE_ROWS
from kernels.cpu.build.vectors import PART
from kernels.cpu.products import order_numpy, tile
from mlx_engine.quant import key_values

# Half a unit in the last place, relative: what one rounding of a float32 costs.
U = 2.0**-24


@jit
def most_vectors() -> int:
    return tile.tile_vectors()


VECTORS = most_vectors()

seeds = st.integers(0, 2**32 - 1)
TYPES, NO_ROWS = tuple(layout.KV_TYPES), np.zeros((0, 64), np.uint8)
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
    added, kept = before.copy(), np.full(tile.KEPT, np.nan, dtype=np.float32)
    size = n // (16 // PART)
    for first in range(0, n, size):
        at, kernel = (offsets[0] + first, offsets[1] + first), tile.keep_dots if first + size < n else tile.add_dots
        y = (added, offsets[2], y_row, kept.ctypes.data, 17) if kernel is tile.add_dots else ()
        kernel(expanded, at[0], w_row, packed, at[1], x_row, n_vectors, n, kept, 0, *y)
    np.testing.assert_array_equal(added[places], before[places] + dots)
    np.testing.assert_array_equal(np.delete(added, places), np.delete(before, places))


def stored_rows(
    rng: np.random.Generator, type_: str, n_rows: int, width: int, gap: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return stored rows (n_rows, bytes) with `gap` other bytes after each, and the numbers in them."""
    rows = key_values.stored(normal(rng, n_rows, width), type_)
    content = np.ascontiguousarray(rows).view(np.uint8).reshape(n_rows, -1)
    other = rng.integers(0, 256, (n_rows, gap), dtype=np.uint8)
    return np.ascontiguousarray(np.hstack([content, other])), key_values.expanded(rows, type_)


@settings(max_examples=80)
@given(
    seed=seeds, type_=st.sampled_from(TYPES), n_rows=st.integers(1, 11), n_vectors=st.integers(1, VECTORS),
    n=st.integers(1, 8).map(lambda n: 32 * n), gap=st.integers(0, 5), ahead=st.sampled_from([0, 100]),
)  # fmt: skip
def test_dot_products_of_stored_rows_have_the_bits_of_their_numbers(
    seed: int, type_: str, n_rows: int, n_vectors: int, n: int, gap: int, ahead: int
):
    """Nothing but the products is written, and at most three more after them."""
    rng = np.random.default_rng(seed)
    rows, numbers = stored_rows(rng, type_, n_rows, n, gap)
    x, y_row = normal(rng, n_vectors, n + 3), n_rows + 5
    before = normal(rng, n_vectors, y_row)
    y, kind, row = before.copy(), layout.KV_TYPES[type_], rows.shape[1]
    stored.set_dots(
        kind, rows.ctypes.data, row, n_rows, x.reshape(-1), 1, n + 3, n_vectors, n, y.reshape(-1), 2, y_row, ahead,
        rows.ctypes.data,
    )  # fmt: skip
    want = order_numpy.dot(numbers, x[:, None, 1 : 1 + n])
    np.testing.assert_array_equal(y[:, 2 : 2 + n_rows], want)
    np.testing.assert_array_equal(y[:, :2], before[:, :2])


@settings(max_examples=60)
@given(
    seed=seeds, type_=st.sampled_from(TYPES), n_sums=st.integers(1, VECTORS), n=st.integers(0, 130),
    blocks=st.integers(1, 9), offsets=st.tuples(*[st.integers(0, 3)] * 2), gaps=st.tuples(*[st.integers(0, 5)] * 3),
    begun=st.integers(0, 130),
)  # fmt: skip
def test_weighted_rows_are_summed_in_their_order(
    seed: int, type_: str, n_sums: int, n: int, blocks: int, offsets: tuple[int, int], gaps: tuple[int, int, int],
    begun: int,
):  # fmt: skip
    """In one call, or in two calls, the second of which continues the sums, as for rows of two pages."""
    rng = np.random.default_rng(seed)
    width = 32 * blocks if type_ == "q8_0" else 16 * blocks
    w_row, y_row = n + gaps[0], width + gaps[2]
    w, before = normal(rng, offsets[0] + VECTORS * w_row), normal(rng, offsets[1] + VECTORS * y_row)
    rows, values = stored_rows(rng, type_, n, width, gaps[1]) if n else (NO_ROWS, np.zeros((0, width), np.float32))
    weights, row = rows_at(w, offsets[0], w_row, n_sums, n), rows.shape[1]
    want = order_numpy.sum_weighted(weights, values)
    terms = weights[..., None].astype(np.float64) * values
    assert (np.abs(want - terms.sum(axis=1)) <= n * U * np.abs(terms).sum(axis=1)).all()
    y = before.copy()
    for first, last in ((0, min(begun, n)), (min(begun, n), n)):
        if last > first or not first:
            stored.sum_weighted(
                layout.KV_TYPES[type_], w, offsets[0] + first, w_row, n_sums, rows.ctypes.data + first * row, row,
                last - first, width, y, offsets[1], y_row, first,
            )  # fmt: skip
    places = offsets[1] + y_row * np.arange(n_sums)[:, None] + np.arange(width)
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
