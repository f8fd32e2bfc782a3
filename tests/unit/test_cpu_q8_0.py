"""The compiled Q8_0 kernels against their NumPy twins and against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks as layout

pytest.importorskip("numba")

from kernels.cpu import q8_0, q8_0_numpy


def matrix(seed: int, n_rows: int, n_blocks: int) -> np.ndarray:
    """Bytes of a Q8_0 matrix, at an odd address, as they lie in a file."""
    rng = np.random.default_rng(seed)
    made = np.empty(n_rows * n_blocks, layout.Q8_0)
    made["qs"] = rng.integers(-128, 128, (len(made), 32), dtype=np.int8)
    made["d"] = rng.standard_normal(len(made)) * 10.0 ** rng.integers(-3, 2, len(made))
    shifted = np.empty(made.nbytes + 1, dtype=np.uint8)
    shifted[1:] = made.view(np.uint8)
    return shifted[1:]


def in_float64(blocks: np.ndarray, n_blocks: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The products, and what their terms add up to without signs, which bounds the rounding."""
    rows = blocks.view(layout.Q8_0)
    terms = rows["qs"].astype(np.float64) * rows["d"].astype(np.float64)[:, None]
    terms = terms.reshape(-1, n_blocks * 32) * x
    return terms.sum(axis=1), np.abs(terms).sum(axis=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 12))
def test_products_are_those_of_float64_and_of_the_twin(seed: int, n_rows: int, n_blocks: int):
    blocks = matrix(seed, n_rows, n_blocks)
    x = np.random.default_rng(seed + 1).standard_normal(n_blocks * 32).astype(np.float32)
    want, size = in_float64(blocks, n_blocks, x)
    for kernels in (q8_0, q8_0_numpy):
        y = np.zeros(n_rows, dtype=np.float32)
        kernels.matvec(blocks, n_blocks * 32, x, y, 0, n_rows)
        # At most n_blocks / 2 sums in a lane, five to join the lanes, and two roundings per term.
        assert (np.abs(y - want) <= (n_blocks + 8) * 2.0**-24 * size).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 12), st.integers(0, 5))
def test_products_with_four_vectors(seed: int, n_rows: int, n_blocks: int, gap: int):
    blocks, n = matrix(seed, n_rows, n_blocks), 32 * n_blocks
    x = np.random.default_rng(seed + 1).standard_normal((4, n)).astype(np.float32)
    for kernels in (q8_0, q8_0_numpy):
        y = np.full((4, n_rows + gap), np.nan, dtype=np.float32)
        kernels.matvec_4(blocks, n, x.reshape(-1), y.reshape(-1), n_rows + gap, 0, n_rows)
        for v in range(4):
            want, size = in_float64(blocks, n_blocks, x[v])
            # One sum per lane here: as many roundings as there are blocks.
            assert (np.abs(y[v, :n_rows] - want) <= (n_blocks + 8) * 2.0**-24 * size).all()
        assert np.isnan(y[:, n_rows:]).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 12), st.tuples(*[st.integers(0, 8)] * 4), st.integers(0, 2),
    st.integers(1, 3),
)  # fmt: skip
def test_four_rows_from_anywhere(seed: int, n_blocks: int, rows: tuple[int, int, int, int], at: int, apart: int):
    blocks, n = matrix(seed, 9, n_blocks), 32 * n_blocks
    x = np.random.default_rng(seed + 1).standard_normal(n).astype(np.float32)
    want, size = in_float64(blocks, n_blocks, x)
    for kernels in (q8_0, q8_0_numpy):
        y = np.full(12, np.nan, dtype=np.float32)
        # From where a row begins to the end of the matrix, as a kernel gets it.
        kernels.four_rows(*[blocks[row * n_blocks * 34 :] for row in rows], n, x, y, at, apart)
        written = at + apart * np.arange(4)
        # One sum per lane here: as many roundings as there are blocks.
        assert (np.abs(y[written] - want[list(rows)]) <= (n_blocks + 8) * 2.0**-24 * size[list(rows)]).all()
        assert np.isnan(np.delete(y, written)).all()


@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 5), (6, 7), (3, 3)])
def test_only_the_rows_asked_for_are_written(first: int, last: int):
    blocks, x = matrix(1, 7, 3), np.ones(4 * 96, dtype=np.float32)
    whole, some = np.zeros(7, dtype=np.float32), np.full(7, np.nan, dtype=np.float32)
    q8_0.matvec(blocks, 96, x, whole, 0, 7)
    q8_0.matvec(blocks, 96, x, some, first, last)
    np.testing.assert_array_equal(some[first:last], whole[first:last])
    assert np.isnan(np.delete(some, range(first, last))).all()
    whole, some = np.zeros((4, 7), dtype=np.float32), np.full((4, 7), np.nan, dtype=np.float32)
    q8_0.matvec_4(blocks, 96, x, whole.reshape(-1), 7, 0, 7)
    q8_0.matvec_4(blocks, 96, x, some.reshape(-1), 7, first, last)
    np.testing.assert_array_equal(some[:, first:last], whole[:, first:last])
    assert np.isnan(np.delete(some, range(first, last), axis=1)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(0, 5), st.data())
def test_expanded_blocks_are_those_of_the_twin_bit_for_bit(seed: int, n_blocks: int, to: int, data: st.DataObject):
    blocks = matrix(seed, 1, n_blocks)
    first = data.draw(st.integers(0, n_blocks))
    last = data.draw(st.integers(first, n_blocks))
    # Longer than what is written, which shows writes on either side of it.
    found, want = (np.full(32 * n_blocks + to + 7, 7, dtype=np.float32) for _ in range(2))
    q8_0.dequantize(blocks, first, last, found, to)
    q8_0_numpy.dequantize(blocks, first, last, want, to)
    np.testing.assert_array_equal(found, want)


def test_every_code_of_a_byte_expands_to_itself():
    one = np.empty(8, layout.Q8_0)
    one["d"], one["qs"] = 1, np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    expanded = np.empty(256, dtype=np.float32)
    q8_0.dequantize(one.view(np.uint8), 0, 8, expanded, 0)
    np.testing.assert_array_equal(expanded, np.arange(-128, 128))


def test_scales_of_every_size_are_widened_exactly():
    """Normal, subnormal and zero halves of both signs."""
    bits = np.arange(0, 1 << 16, 37, dtype=np.uint16)
    scales = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    made = np.empty(len(scales), layout.Q8_0)
    made["d"], made["qs"] = scales, 1
    expanded = np.empty(32 * len(scales), dtype=np.float32)
    q8_0.dequantize(made.view(np.uint8), 0, len(scales), expanded, 0)
    np.testing.assert_array_equal(expanded.reshape(-1, 32), np.repeat(scales.astype(np.float32)[:, None], 32, axis=1))
