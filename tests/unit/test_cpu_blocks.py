"""The compiled kernels for codes of 4 and 6 bits against their NumPy twins, the `gguf` package and float64."""

from __future__ import annotations

from types import ModuleType

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks as layout

pytest.importorskip("numba")

from kernels.cpu import blocks_numpy, q4_0, q4_1, q4_k, q6_k

# By name: the kernels, the twin, and the weights of a block.
FORMATS = {
    "Q4_0": (q4_0, blocks_numpy.q4_0, 32),
    "Q4_1": (q4_1, blocks_numpy.q4_1, 32),
    "Q4_K": (q4_k, blocks_numpy.q4_k, 256),
    "Q6_K": (q6_k, blocks_numpy.q6_k, 256),
}
formats = st.sampled_from(list(FORMATS))
seeds = st.integers(0, 2**32 - 1)


def matrix(name: str, seed: int, n_blocks: int) -> np.ndarray:
    """Any bytes are weights; float16 fields are numbers of many sizes. At an odd address, as blocks lie in a file."""
    rng, kind = np.random.default_rng(seed), getattr(layout, name)
    made = rng.integers(0, 256, n_blocks * kind.itemsize, dtype=np.uint8).view(kind)
    for field in ("d", "m", "dmin"):
        if field in kind.names:
            made[field] = rng.standard_normal(n_blocks) * 10.0 ** rng.integers(-3, 2, n_blocks)
    shifted = np.empty(made.nbytes + 1, dtype=np.uint8)
    shifted[1:] = made.view(np.uint8)
    return shifted[1:]


def exact(name: str, blocks: np.ndarray) -> np.ndarray:
    """Weights as the `gguf` package reads them."""
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(-1)


def products(kernels: ModuleType, blocks: np.ndarray, x: np.ndarray, n_rows: int) -> np.ndarray:
    """As `formats.py` multiplies."""
    room, y = np.full(2 * x.size + 256, np.nan, dtype=np.float32), np.full(n_rows, np.nan, dtype=np.float32)
    kernels.prepare(x, x.size, room)
    kernels.matvec(blocks, x.size, room, y, 0, n_rows)
    return y


@settings(max_examples=120, deadline=None, derandomize=True)
@given(formats, seeds, st.integers(1, 7), st.integers(1, 9))
def test_products_are_those_of_float64_and_of_the_twin(name: str, seed: int, n_rows: int, n_blocks: int):
    kernels, expand, size = FORMATS[name]
    blocks = matrix(name, seed, n_rows * n_blocks)
    x = np.random.default_rng(seed + 1).standard_normal(n_blocks * size).astype(np.float32)
    weights = exact(name, blocks).astype(np.float64).reshape(n_rows, -1)
    # A code and its offset are multiplied apart: what cancels is up to 17 times as large as the weight's own term, for
    # a Q4_K code of 15 whose minimum is as large. In units of what a block's largest weights add up to, few roundings.
    largest = np.abs(weights.reshape(n_rows, n_blocks, -1)).max(axis=2).repeat(size, axis=1)
    bound = (4 * n_blocks + 40) * 2.0**-24 * np.maximum(largest, parts(name, blocks, n_rows)) @ np.abs(x)
    assert (np.abs(products(kernels, blocks, x, n_rows) - weights @ x) <= bound).all()
    twin = np.zeros(n_rows, dtype=np.float32)
    blocks_numpy.matvec(expand, blocks, x, twin, 0, n_rows)
    assert (np.abs(twin - weights @ x) <= (len(x) + 8) * 2.0**-24 * np.abs(weights) @ np.abs(x)).all()


def parts(name: str, blocks: np.ndarray, n_rows: int) -> np.ndarray:
    """Of each weight the larger of the two numbers whose difference it is."""
    found = blocks.view(getattr(layout, name))
    if name in ("Q4_0", "Q6_K"):
        size = np.abs(exact(name, blocks)).reshape(len(found), -1)
        scale = np.abs(found["d"].astype(np.float64)) * (8 if name == "Q4_0" else 32 * 128)
        return np.maximum(size, scale[:, None]).reshape(n_rows, -1)
    scale = 15 * np.abs(found["d"].astype(np.float64)) + np.abs(found["m"].astype(np.float64)) if name == "Q4_1" else (
        15 * 63 * np.abs(found["d"].astype(np.float64)) + 63 * np.abs(found["dmin"].astype(np.float64))
    )  # fmt: skip
    return np.repeat(scale, 32 if name == "Q4_1" else 256).reshape(n_rows, -1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [256, 1024, 3072])
def test_products_with_weights_as_models_have_them(name: str, width: int):
    """Scales are alike and codes lie around the middle: the error is that of any float32 sum."""
    kernels, rng = FORMATS[name][0], np.random.default_rng(width)
    blocks = matrix(name, width, 64 * width // FORMATS[name][2])
    found = blocks.view(getattr(layout, name))
    found["d"] = (1 + rng.random(len(found))) * 1e-3
    if "dmin" in found.dtype.names:
        found["dmin"] = found["d"] * 7
    if "m" in found.dtype.names:
        found["m"] = found["d"] * -7.5
    x = rng.standard_normal(width).astype(np.float32)
    want = exact(name, blocks).astype(np.float64).reshape(64, -1) @ x
    error = products(kernels, blocks, x, 64) - want
    assert np.linalg.norm(error) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 5), (6, 7), (3, 3)])
def test_only_the_rows_asked_for_are_written(name: str, first: int, last: int):
    kernels, _, size = FORMATS[name]
    blocks, x = matrix(name, 1, 7 * 3), np.random.default_rng(2).standard_normal(3 * size).astype(np.float32)
    whole, room = products(kernels, blocks, x, 7), np.empty(2 * x.size + 256, dtype=np.float32)
    some = np.full(7, np.nan, dtype=np.float32)
    kernels.prepare(x, x.size, room)
    kernels.matvec(blocks, x.size, room, some, first, last)
    np.testing.assert_array_equal(some[first:last], whole[first:last])
    assert np.isnan(np.delete(some, range(first, last))).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(formats, seeds, st.integers(1, 12), st.integers(0, 5), st.data())
def test_expanded_blocks_are_those_of_everyone_bit_for_bit(
    name: str, seed: int, n_blocks: int, to: int, data: st.DataObject
):
    kernels, expand, size = FORMATS[name]
    blocks = matrix(name, seed, n_blocks)
    first = data.draw(st.integers(0, n_blocks))
    last = data.draw(st.integers(first, n_blocks))
    # Longer than what is written, which shows writes on either side of it.
    found = np.full(size * n_blocks + to + 7, 7, dtype=np.float32)
    want = found.copy()
    kernels.dequantize(blocks, first, last, found, to)
    want[to : to + size * (last - first)] = exact(name, blocks)[size * first : size * last]
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(expand(blocks).reshape(-1), exact(name, blocks))
