"""Exponentials, activations, norms and rotations against their NumPy twins and against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.build.exponentials import exp, exp2_below, tanh
from kernels.cpu.build.jit import jit
from kernels.cpu.build.layout import GELU, GELU_ERF, RELU2, SILU
from kernels.cpu.build.vectors import LANES, load, store
from kernels.cpu.products import norms, order_numpy
from kernels.cpu.products.activations import gated
from tests import cpu_reference as reference

U = 2.0**-24


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- the exponential ----


@jit
def exponentials(x: Any, out: Any) -> None:
    for i in range(0, len(x), LANES):
        store(out, i, exp(load(x, i)))


def exp_of(x: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(x) + LANES - 1) // LANES * LANES, dtype=np.float32)
    padded[: len(x)] = x
    out = np.empty_like(padded)
    exponentials(padded, out)
    return out[: len(x)]


def test_exp_is_within_one_unit_in_the_last_place_wherever_float32_has_one():
    """Return arguments from underflow through subnormal results to overflow, and tiny arguments."""
    whole_range = np.linspace(-103.9, 88.7228, 1 << 20).astype(np.float32)
    tiny = np.float32(2.0) ** np.arange(-149, 3, dtype=np.float32)
    x = np.concatenate([whole_range, tiny, -tiny])
    want = np.exp(x.astype(np.float64))
    unit = np.spacing(want.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp_of(x) - want) <= unit).all()


def test_exp_where_float32_ends():
    x = np.array([0.0, -0.0, 88.73, 89, 1e4, 3e38, np.inf, -104.5, -150, -1e4, -3e38, -np.inf], dtype=np.float32)
    np.testing.assert_array_equal(exp_of(x), [1, 1, *[np.inf] * 5, *[0] * 5])
    assert np.isnan(exp_of(np.array([1, np.nan, -1], dtype=np.float32))).tolist() == [False, True, False]


@jit
def tangents(x: Any, out: Any) -> None:
    for i in range(0, len(x), LANES):
        store(out, i, tanh(load(x, i)))


def test_tanh_is_within_three_units_in_the_last_place():
    """Tiny arguments, which are their own tanh, and arguments whose tanh is 1."""
    tiny = np.float32(2.0) ** np.arange(-149, 3, dtype=np.float32)
    edges = np.array([0.0, -0.0, 3e38, -3e38, np.inf, -np.inf, 20.0, -20.0], dtype=np.float32)
    x = np.concatenate([np.linspace(-11, 11, 1 << 18).astype(np.float32), tiny, -tiny, edges])
    x, found = x[: len(x) // LANES * LANES], np.empty(len(x) // LANES * LANES, dtype=np.float32)
    tangents(x, found)
    want = np.tanh(x.astype(np.float64))
    unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - want) <= 3 * unit).all()
    np.testing.assert_array_equal(found, order_numpy.tanh(x))
    nothing = np.full(LANES, np.nan, dtype=np.float32)
    tangents(nothing, nothing)
    assert np.isnan(nothing).all()


@jit
def powers_of_two(x: Any, out: Any) -> None:
    for i in range(0, len(x), LANES):
        store(out, i, exp2_below(load(x, i)))


def test_powers_of_two_below_one():
    """Within one unit in the last place for normal results; negligible below."""
    x = np.concatenate([np.linspace(-126, 0, 1 << 18), -(2.0 ** np.arange(-149, 7))]).astype(np.float32)
    beyond = np.array([-126.2, -126.7, -127, -127.3, -150, -1e4, -3e38, -np.inf] * 2, dtype=np.float32)
    found, behind = np.empty(len(x) // 16 * 16, dtype=np.float32), np.empty_like(beyond)
    x = x[: len(found)]
    powers_of_two(x, found), powers_of_two(beyond, behind)
    inside = x >= -126
    want = np.exp2(x.astype(np.float64))
    unit = np.spacing(want.astype(np.float32)).astype(np.float64)
    assert (np.abs(found - want) <= unit)[inside].all()
    assert found[x == 0].tolist() == [1.0]
    assert ((behind >= 0) & (behind <= 2.0**-126)).all()
    np.testing.assert_array_equal(behind[4:8], 0)
    missing = np.full(16, np.nan, dtype=np.float32)
    powers_of_two(missing, missing)
    assert np.isnan(missing).all()


# ---- activations ----


@jit
def gated_products(activation: int, gate: Any, up: Any, out: Any) -> None:
    for i in range(0, len(gate), LANES):
        store(out, i, gated(activation, load(gate, i), load(up, i)))


EXTREMES = [-1e4, -150, -104, -90, -88, -20, -5.5, -1, -1e-3, -1e-30, 0, 1e-30, 1e-3, 0.5, 1, 20, 88, 90, 1e4, 3e5]


@pytest.mark.some(2)
@pytest.mark.parametrize(("kind", "name"), [(SILU, "silu"), (GELU, "gelu"), (GELU_ERF, "gelu_erf"), (RELU2, "relu2")])
def test_activations_are_those_of_float64_and_of_the_twin(kind: int, name: str):
    rng = np.random.default_rng(kind)
    x = np.concatenate([EXTREMES, np.linspace(-12, 12, 4060), rng.uniform(-100, 100, 16)]).astype(np.float32)
    up, out = normal(rng, len(x)), np.empty_like(x)
    gated_products(kind, x, up, out)
    twin = getattr(reference, name)
    wide = x.astype(np.float64)
    want = twin(wide) * up
    # What goes into exp has been rounded a few times, and exp makes of a relative error one times its argument.
    of_tanh = 1.6 * np.abs(wide) * (1 + 0.044715 * wide**2)
    argument = {"silu": np.abs(wide), "gelu_erf": wide**2}.get(name, of_tanh)
    # Where exp overflows, from 88.7 on, 0 stands for what is at most 89 / 2**128.
    bound = (8 + 8 * argument) * U * np.abs(want) + 2.0**-121 * (1 + np.abs(up))
    assert (np.abs(out - want) <= bound).all()
    assert (np.abs(twin(x) * up - want) <= bound).all()


# ---- norms ----


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(1, 150), at=st.integers(0, 3), to=st.integers(0, 3),
    scale=st.sampled_from([1e-15, 1e-3, 1.0, 1e6]), eps=st.sampled_from([1e-6, 1e-5, 0.3]),
)  # fmt: skip
def test_norms_of_rows_of_any_length(seed: int, n: int, at: int, to: int, scale: float, eps: float):
    rng = np.random.default_rng(seed)
    x, gain = normal(rng, at + n + 2) * np.float32(scale), normal(rng, n)
    want = np.empty(to + n, dtype=np.float64)
    reference.rms_norm(x.astype(np.float64), at, n, gain.astype(np.float64), eps, want, to)
    for rms_norm in (norms.rms_norm, reference.rms_norm):
        out = np.full(to + n + 2, np.nan, dtype=np.float32)
        rms_norm(x, at, n, gain, eps, out, to)
        # The root halves the mean's relative error, of at most 2 n roundings; the rest are four of its own.
        assert (np.abs(out[to : to + n] - want[to:]) <= (n + 5) * U * np.abs(want[to:])).all()
        assert np.isnan(out[:to]).all()
        assert np.isnan(out[to + n :]).all()


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(1, 150), at=st.integers(0, 3), to=st.integers(0, 3),
    scale=st.sampled_from([1e-15, 1e-3, 1.0, 1e6]), shift=st.sampled_from([0.0, 1.0, 30.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.3]),
)  # fmt: skip
def test_layer_norms_of_rows_of_any_length(seed: int, n: int, at: int, to: int, scale: float, shift: float, eps: float):
    rng = np.random.default_rng(seed)
    x, gain, bias = (normal(rng, at + n + 2) + np.float32(shift)) * np.float32(scale), normal(rng, n), normal(rng, n)
    wide, want = x.astype(np.float64), np.empty(to + n)
    reference.layer_norm(wide, at, n, gain.astype(np.float64), bias.astype(np.float64), eps, want, to)
    row = wide[at : at + n]
    # The mean has n roundings of the largest, and each element one more; all are seen in units of the root, twice:
    # in what is divided, and in the root itself. The rest are four roundings, and that of the sum with the bias.
    root = np.sqrt(np.var(row) + eps)
    off = 2 * (n + 2) * U * np.abs(row).max() / root
    normed = np.abs(row - row.mean()) / root
    bound = np.abs(gain) * (off * (1 + normed) + (n + 5) * U * normed) + U * np.abs(want[to:])
    for layer_norm in (norms.layer_norm, reference.layer_norm):
        out = np.full(to + n + 2, np.nan, dtype=np.float32)
        layer_norm(x, at, n, gain, bias, eps, out, to)
        assert (np.abs(out[to : to + n] - want[to:]) <= bound).all()
        assert np.isnan(out[:to]).all()
        assert np.isnan(out[to + n :]).all()


def test_a_row_may_be_normed_in_place():
    x, gain = normal(np.random.default_rng(5), 3, 50).reshape(-1), normal(np.random.default_rng(6), 50)
    for norm in (
        lambda out: norms.rms_norm(x, 50, 50, gain, 1e-6, out, 50),
        lambda out: norms.layer_norm(x, 50, 50, gain, gain, 1e-6, out, 50),
    ):
        out = x.copy()
        norm(out)
        norm(x)
        np.testing.assert_array_equal(x, out)


# ---- rotations ----


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_rotations_are_those_of_the_twin(seed: int, half: int, at: int, row: int, in_place: bool):
    rng = np.random.default_rng(seed)
    x, angles = normal(rng, at + 2 * half + 2), rng.uniform(-4, 4, row + half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    wide, want = x.astype(np.float64), np.empty(at + 2 * half)
    reference.rotate(wide, at, half, cos, sin, row, want, at)
    out = x if in_place else np.full_like(x, np.nan)
    behind = out[at + 2 * half :].copy()
    norms.rotate(x, at, half, cos, sin, row, out, at)
    # Two products and a sum: three roundings of at most what the terms add up to without signs.
    size = np.abs(wide[at:][: 2 * half]).reshape(2, half).sum(axis=0)
    assert (np.abs(out[at : at + 2 * half] - want[at:]) <= 3 * U * np.tile(size, 2)).all()
    np.testing.assert_array_equal(out[at + 2 * half :], behind)
