"""Heads normed and rotated over a pool, against the NumPy twin and against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.build import layout, library, pool
from mlx_engine.backends import create_backend
from mlx_engine.backends.numpy.simd import SimdBackend
from tests import cpu_reference as reference

U = 2.0**-24
LIBRARY = library.load()
POOL = pool.Pool(2, LIBRARY)
SIMD, PARALLEL = SimdBackend(), create_backend("parallel", threads=2)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.sampled_from([1, 2, 5, 31, 32, 33, 70]),
    n_heads=st.integers(1, 5), width=st.sampled_from([2, 8, 16, 32, 48, 64, 80, 96, 128]),
    n_positions=st.integers(1, 80), normed=st.booleans(), beside=st.sampled_from([0, 16, 24]),
)  # fmt: skip
def test_heads_are_those_of_the_twin(
    seed: int, n_tokens: int, n_heads: int, width: int, n_positions: int, normed: bool, beside: int
):
    """Positions are in random order; keys are columns after the queries, as one product writes them."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_tokens, beside + (n_heads + 1) * width)).astype(np.float32)
    q, k = rows[:, beside : beside + n_heads * width], rows[:, beside + n_heads * width :]
    angles, positions = rng.uniform(-9, 9, (n_positions, 1, width // 2)), rng.integers(0, n_positions, n_tokens)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    gains = rng.standard_normal((2, width if normed else 0)).astype(np.float32)
    found = [np.full((n_tokens, n, width), np.nan, dtype=np.float32) for n in (n_heads, 1)]
    words = np.zeros(layout.K_NORM_EPS + 1, dtype=np.int64)
    words[: layout.HEAD_DIM + 1] = LIBRARY.address("norm_rope"), n_heads, 1, width
    words.view(np.float64)[[layout.Q_NORM_EPS, layout.K_NORM_EPS]] = 1e-6, 1e-5
    words[[layout.Q_NORM_WEIGHT, layout.K_NORM_WEIGHT]] = [gain.ctypes.data if normed else 0 for gain in gains]
    row = rows.shape[1]
    LIBRARY.norm_rope_pair(
        POOL.address, words.ctypes.data, n_tokens, positions.ctypes.data, q.ctypes.data, row, k.ctypes.data, row,
        cos.ctypes.data, sin.ctypes.data, found[0].ctypes.data, found[1].ctypes.data,
    )  # fmt: skip
    for x, gain, eps, out in zip((q, k), gains, (1e-6, 1e-5), found, strict=True):
        want = np.empty(out.shape)
        turns = cos[positions], sin[positions], 0
        reference.norm_rope(x.astype(np.float64), gain.astype(np.float64), eps, *turns, want)
        twin = np.empty_like(out)
        reference.norm_rope(x, gain, eps, *turns, twin)
        # A rotation mixes the halves of a head, so the bound is that of its longer half; a norm has width + 5
        # roundings, a rotation three.
        size = np.abs(want).reshape(*want.shape[:2], 2, -1).sum(axis=2)
        bound = 2 * (width + 8) * U * np.tile(size, 2)
        assert (np.abs(out - want) <= bound).all()
        assert (np.abs(twin - want) <= bound).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.sampled_from([1, 2, 31, 32, 33, 70]), n_heads=st.integers(1, 3),
    width=st.sampled_from([2, 16, 40]), spare=st.integers(0, 5), apart=st.booleans(), behind=st.booleans(),
)  # fmt: skip
def test_heads_are_put_where_numpy_puts_them(
    seed: int, n_tokens: int, n_heads: int, width: int, spare: int, apart: bool, behind: bool
):
    """Slots are in random order or consecutive; keys are rows of their own or, like values, columns after others.

    Nothing else is written.
    """
    rng = np.random.default_rng(seed)
    size = n_heads * width
    rows = rng.standard_normal((n_tokens, 8 + 2 * size)).astype(np.float32)
    k, v = (rows[:, first : first + size].reshape(n_tokens, n_heads, width) for first in (8, 8 + size))
    k = k if behind else k.copy()
    slots = rng.permutation(n_tokens + spare)[:n_tokens] if apart else np.arange(spare, n_tokens + spare)
    stores = [np.full((2, n_heads, n_tokens + spare, width), 7, dtype=np.float32) for _ in range(3)]
    for t, slot in enumerate(slots):
        stores[0][:, :, slot] = k[t], v[t]
    SIMD.kv_write(stores[1], slots, k, v)
    with PARALLEL.session():
        assert PARALLEL.kv_write(stores[2], slots, k, v) is stores[2]
    for found in stores[1:]:
        np.testing.assert_array_equal(found, stores[0])


@pytest.mark.parametrize("slots", [[3, 4, 5], [5, 6, 7], [0, 1], [0, 1, 2, 3], [4, 2, 5]], ids=str)
def test_heads_that_do_not_fit_are_refused_as_numpy_refuses_them(slots: list[int]):
    heads, store = np.ones((3, 2, 16), dtype=np.float32), np.zeros((2, 2, 5, 16), dtype=np.float32)
    with PARALLEL.session(), pytest.raises((ValueError, IndexError), match=r"broadcast|out of bounds"):
        PARALLEL.kv_write(store, np.array(slots), heads, heads)
    assert not store.any()
