"""Rows of every format as they are stored: weights are those of the `gguf` package, products have the order of NumPy's.

Both bit for bit, from anywhere in memory, and products against float64 as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks as layout

pytest.importorskip("numba")

from kernels.cpu.build import library
from kernels.cpu.build.layout import LANES, STRETCH
from kernels.cpu.build.vectors import PART
from kernels.cpu.formats import blocks_numpy, float32
from kernels.cpu.formats.format import FORMAT_SCRATCH
from kernels.cpu.formats.sums import PANEL_SIZES
from kernels.cpu.products import order_numpy

U = 2.0**-24
# By name: the twin that expands.
FORMATS = {name.upper(): getattr(blocks_numpy, name) for name in library.FORMATS if name != "float32"}
ROOM = np.empty(FORMAT_SCRATCH, dtype=np.uint8)
seeds = st.integers(0, 2**32 - 1)
formats = st.sampled_from(list(FORMATS))


@cache
def kernels(name: str) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Return the machine code of a format: products with rows, expansion, and the weights of a block."""
    found = library.load().format(name.lower())
    many: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 20)
    some: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
    return many(found.four_rows), some(found.expand), found.block


def matrix(name: str, seed: int, n_blocks: int) -> np.ndarray:
    """Return random blocks with float16 fields of many magnitudes, at an odd address, as in a file."""
    rng, kind = np.random.default_rng(seed), getattr(layout, name)
    made = rng.integers(0, 256, n_blocks * kind.itemsize, dtype=np.uint8).view(kind)
    for field in ("d", "m", "dmin"):
        if field in kind.names:
            made[field] = rng.standard_normal(n_blocks) * 10.0 ** rng.integers(-3, 2, n_blocks)
    if name == "MXFP4":  # products of larger powers of two are infinite
        made["e"] = rng.integers(100, 140, n_blocks)
    return at_an_odd_address(made.view(np.uint8))


def at_an_odd_address(data: np.ndarray) -> np.ndarray:
    shifted = np.empty(data.size + 1, dtype=np.uint8)
    shifted[1:] = data
    return shifted[1:]


def exact(name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the weights that the `gguf` package reads."""
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(-1)


def check_four_rows(
    name: str, data: np.ndarray, weights: np.ndarray, rows: tuple[int, ...], n_vectors: int,
    count: int, seed: int, gaps: tuple[int, int, int],
) -> None:  # fmt: skip
    """Return products of rows of four ranges with an unaligned panel of vectors, added to the previous values."""
    rng = np.random.default_rng(seed)
    (n_rows, n), row_bytes = weights.shape, data.size // len(weights)
    x = rng.standard_normal((n_vectors, n)).astype(np.float32)
    panel = np.concatenate([[np.nan] * gaps[0], x.reshape(n_vectors, -1, 16).swapaxes(0, 1).reshape(-1)])
    apart, y_row = count + gaps[1], 4 * (count + gaps[1]) + gaps[2]
    y = rng.standard_normal(gaps[2] + n_vectors * y_row).astype(np.float32)
    places = gaps[2] + apart * np.arange(4)[:, None, None] + np.arange(count)[:, None] + y_row * np.arange(n_vectors)
    before = y.copy()
    start = data.ctypes.data
    panel, multiply = panel.astype(np.float32), kernels(name)[0]
    arguments = (
        n_vectors, *(start + row * row_bytes for row in rows), *[start + (n_rows - 1) * row_bytes] * 4, row_bytes,
        count, n, panel.ctypes.data, gaps[0],
    )  # fmt: skip
    after = gaps[2], apart, y_row, 1024, ROOM.ctypes.data
    multiply(*arguments, y.ctypes.data, *after)
    # After the last row of a range the last row is read again.
    taken = weights[np.minimum(np.array(rows)[:, None] + np.arange(count), n_rows - 1)]
    dots = order_numpy.dot(taken[:, :, None], x)
    if n <= STRETCH:
        np.testing.assert_array_equal(y[places], before[places] + dots)
    np.testing.assert_array_equal(np.delete(y, places), np.delete(before, places))
    y = np.zeros_like(y)
    multiply(*arguments, y.ctypes.data, *after)
    np.testing.assert_array_equal(y[places], dots)
    terms = taken[:, :, None].astype(np.float64) * x
    # A lane's sums, four to join the lanes, and one for each stretch.
    roundings = min(n, STRETCH) / 16 + 5 + -(-n // STRETCH)
    assert (np.abs(y[places] - terms.sum(axis=-1)) <= roundings * U * np.abs(terms).sum(axis=-1)).all()


anywhere = {
    "rows": st.tuples(*[st.integers(0, 6)] * 4), "n_vectors": st.sampled_from(PANEL_SIZES), "count": st.integers(1, 3),
    "gaps": st.tuples(*[st.integers(0, 3)] * 3),
}  # fmt: skip


@settings(max_examples=150)
@given(name=formats, seed=seeds, n=st.one_of(st.integers(1, 9), st.sampled_from([32, 33, 40, 72])), **anywhere)
def test_rows_of_four_places(
    name: str, seed: int, n: int, rows: tuple[int, ...], n_vectors: int, count: int, gaps: tuple[int, int, int]
):
    """From one block to more than two stretches."""
    size = kernels(name)[2]
    n_blocks = n if size == 32 else -(-n // 8)
    blocks = matrix(name, seed, 7 * n_blocks)
    weights = exact(name, blocks).reshape(7, -1)
    check_four_rows(name, blocks, weights, rows, n_vectors, count, seed + 1, gaps)


def test_the_smallest_and_the_largest_powers_of_two_are_exact():
    """Every byte of MXFP4's scale, also those whose scales are subnormal, and products that are infinite."""
    blocks = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    found = np.empty(256 * 32, dtype=np.float32)
    kernels("MXFP4")[1](blocks.ctypes.data, 0, 256, found.ctypes.data, 0, LANES, PART, 0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, exact("MXFP4", blocks))


@pytest.mark.slow
@settings(max_examples=50)
@given(seed=seeds, n=st.one_of(st.integers(1, 9), st.sampled_from([64, 65, 80, 129])), **anywhere)
def test_rows_of_float32_of_four_places(
    seed: int, n: int, rows: tuple[int, ...], n_vectors: int, count: int, gaps: tuple[int, int, int]
):
    weights = np.random.default_rng(seed).standard_normal((7, 16 * n)).astype(np.float32)
    data = at_an_odd_address(weights.reshape(-1).view(np.uint8))
    check_four_rows("float32", data, weights, rows, n_vectors, count, seed + 1, gaps)


def orders(n: int) -> st.SearchStrategy[tuple[int, int, np.ndarray]]:
    """Yield the layouts of n expanded weights, in order and in parts: step, apart, and the place of each weight."""
    parts = LANES // PART
    own = np.arange(n)
    in_parts = own.reshape(parts, n // LANES, PART).swapaxes(0, 1).reshape(-1)
    return st.sampled_from([(LANES, PART, own), (PART, n // parts, in_parts)])


@settings(max_examples=120)
@given(formats, seeds, st.integers(1, 12), st.integers(0, 5), st.data())
def test_expanded_blocks_are_those_of_the_gguf_package_bit_for_bit(
    name: str, seed: int, n_blocks: int, to: int, data: st.DataObject
):
    _, dequantize, size = kernels(name)
    blocks = matrix(name, seed, n_blocks)
    first = data.draw(st.integers(0, n_blocks))
    last = data.draw(st.integers(first, n_blocks))
    # Longer than what is written, which shows writes on either side of it.
    found = np.full(size * n_blocks + to + 7, 7, dtype=np.float32)
    want = found.copy()
    step, apart, places = data.draw(orders(size * (last - first)))
    dequantize(blocks.ctypes.data, first, last, found.ctypes.data, to, step, apart, ROOM.ctypes.data)
    want[to + places] = exact(name, blocks)[size * first : size * last]
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(FORMATS[name](blocks).reshape(-1), exact(name, blocks))


@settings(max_examples=30)
@given(seeds, st.integers(0, 70), st.integers(0, 3), st.integers(0, 3), st.data())
def test_copied_rows_end_with_zeros(seed: int, n: int, at: int, to: int, data: st.DataObject):
    weights = np.random.default_rng(seed).standard_normal(at + n + 1).astype(np.float32)
    out, whole = np.full(to + 100, 7, dtype=np.float32), -(-n // 16) * 16
    step, apart, places = data.draw(orders(whole))
    float32.copy(weights, at, n, out, to, step, apart)
    np.testing.assert_array_equal(out[to + places], np.pad(weights[at : at + n], (0, whole - n)))
    assert (np.delete(out, range(to, to + whole)) == 7).all()
