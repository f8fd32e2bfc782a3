"""Products in fixed point against their definition in NumPy, to the last bit, on any processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from kernels.cpu.build.jit import jit
from kernels.cpu.build.library import FORMATS, affine_format
from kernels.cpu.build.vectors import pair_dot
from kernels.cpu.formats import blocks_numpy
from kernels.cpu.formats.panels import DEPTH, QUADS, ROW_WORDS, ROWS
from kernels.cpu.products import fixed, fixed_numpy, fixed_tile
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.descriptors import Matrix
from mlx_engine.backends.cpu.kernels import load_kernels
from mlx_engine.backends.parameters import Linear, RMSNorm
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.random_blocks import SPREAD, random_blocks, random_groups

EPS = 1e-6
LIBRARY = load_kernels()
assert LIBRARY is not None
BE, ALONE, EXACT = (CompiledBackend(LIBRARY, "parallel", *of) for of in ((3, "i16"), (1, "i16"), (2, "f32")))
AFFINE = ["AFFINE4_G64_BF16", "AFFINE8_G32_F16", "AFFINE3_G128_F32", "AFFINE6_G64_F16"]
KINDS = [name.upper() for name in FORMATS if name != "float32"] + AFFINE
# One of each kind of panel; the others are left to `-m slow`, because each is compiled alone.
FAST = ("Q8_0", "Q4_K", "Q6_K", "AFFINE4_G64_BF16")
KIND = pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST)) for k in KINDS])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def matrix(rng: np.random.Generator, kind: str, n: int, k: int) -> Weight:
    if kind.startswith("AFFINE"):
        return random_groups(rng, "w", kind, n, k)
    if kind in SPREAD:
        return random_blocks(rng, "w", kind, n, k)
    return Weight.pack("w", normal(rng, n, k), BY_NAME[kind])


def layer(rng: np.random.Generator, kind: str, n: int, k: int, *, bias: bool = False) -> Linear:
    return Linear("w", BE.prepare(matrix(rng, kind, n, k)), normal(rng, n) if bias else None)


def twin(x: np.ndarray, of: Linear) -> np.ndarray:
    """Return the product as the definition has it, with the bias."""
    stored: Matrix = of.weight
    affine = affine_format(stored.format)
    parts = (
        getattr(blocks_numpy, stored.format).parts(stored.data)
        if affine is None
        else blocks_numpy.affine.parts(stored.data.reshape(-1, LIBRARY.format(stored.format).block_bytes), *affine)
    )
    y = fixed_numpy.multiply(parts, stored.shape[0], fixed_numpy.quantize(x))
    return y if of.bias is None else y + of.bias


# ---- products ----


@KIND
@pytest.mark.parametrize("t", [1, 2, fixed_tile.TOKENS + 1, 130])
def test_a_product_is_its_definition(kind: str, t: int):
    """Rows fill a panel and a part of one, columns more than are expanded together."""
    rng = np.random.default_rng(t)
    of, x = layer(rng, kind, ROWS + 5, 2 * DEPTH + 256, bias=True), normal(rng, t, 2 * DEPTH + 256)
    np.testing.assert_array_equal(BE.linear(x, of), twin(x, of))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_any_number_of_tokens(kind: str):
    rng = np.random.default_rng(0)
    of, x = layer(rng, kind, 203, 1024), normal(rng, 130, 1024)
    want = twin(x, of)
    for t in range(1, 131):
        np.testing.assert_array_equal(BE.linear(x[:t], of), want[:t])
        np.testing.assert_array_equal(BE.linear(x[-t:], of), want[-t:])


@pytest.mark.some(2)
@pytest.mark.parametrize("t", [1, 9, 300, 513])
def test_threads_and_chunks_do_not_change_bits(t: int):
    rng = np.random.default_rng(t)
    of, x, residual = layer(rng, "Q8_0", 300, 96, bias=True), normal(rng, t, 96), normal(rng, t, 300)
    found = BE.project_add(x, of, residual)
    np.testing.assert_array_equal(found, ALONE.project_add(x, of, residual))
    np.testing.assert_array_equal(found, twin(x, of) + residual)
    np.testing.assert_array_equal(found[t // 2 :], ALONE.project_add(x[t // 2 :], of, residual[t // 2 :]))


@pytest.mark.parametrize("kinds", [("Q8_0", "Q4_K", "Q6_K"), ("Q8_0", "F32", "Q4_K"), ("F32", "Q8_0", "F32")])
@pytest.mark.parametrize("t", [1, 14])
def test_matrices_of_one_normed_input(kinds: Sequence[str], t: int):
    """Products of float32 matrices are those of float32."""
    rng = np.random.default_rng(t)
    layers = [layer(rng, kind, 40 + 7 * i, 256, bias=i == 1) for i, kind in enumerate(kinds)]
    x, norm = normal(rng, t, 256), RMSNorm("n", normal(rng, 256), EPS)
    normed = EXACT.norm(x, norm)
    for kind, of, found in zip(kinds, layers, BE.norm_project(x, norm, layers), strict=True):
        np.testing.assert_array_equal(found, EXACT.linear(normed, of) if kind == "F32" else twin(normed, of))


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q4_K", "Q6_K"), ("F32", "Q8_0")])
@pytest.mark.parametrize("t", [1, 27])
def test_a_gate_and_what_it_gates(kinds: tuple[str, str], t: int):
    """Both are in fixed point, or neither."""
    rng = np.random.default_rng(t)
    gate, up = (layer(rng, kind, ROWS + 9, 256, bias=True) for kind in kinds)
    x, norm = normal(rng, t, 256), RMSNorm("n", normal(rng, 256), EPS)
    found = BE.norm_gate_up(x, norm, gate, up, "silu")
    if "F32" in kinds:
        np.testing.assert_array_equal(found, EXACT.norm_gate_up(x, norm, gate, up, "silu"))
        return
    g, u = (twin(EXACT.norm(x, norm), of).astype(np.float64) for of in (gate, up))
    np.testing.assert_allclose(found, g / (1 + np.exp(-g)) * u, rtol=1e-5, atol=1e-6)


def test_the_default_is_float32():
    rng = np.random.default_rng(0)
    of, x = layer(rng, "Q8_0", 64, 256), normal(rng, 5, 256)
    assert EXACT._block((of,)).n_fixed == 0 < BE._block((of,)).n_fixed
    error = np.linalg.norm(BE.linear(x, of) - EXACT.linear(x, of)) / np.linalg.norm(EXACT.linear(x, of))
    assert 0 < error < 5e-5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("t", [1, 20])
def test_what_is_not_finite_stays_visible(value: float, t: int):
    rng = np.random.default_rng(t)
    of, x = layer(rng, "Q4_K", 50, 256), normal(rng, t, 256)
    want = BE.linear(x, of)
    x[t // 2, 77] = value
    found = BE.linear(x, of)
    assert np.isnan(found[t // 2]).all()
    others = np.arange(t) != t // 2
    np.testing.assert_array_equal(found[others], want[others])


# ---- quantising, and the tile ----


def test_rows_are_quantized_as_defined():
    """Ties, signs of zero, the smallest and the largest numbers, and what is not a number."""
    rng = np.random.default_rng(0)
    x = normal(rng, 12, 64) * np.float32(10) ** rng.integers(-38, 38, (12, 1)).astype(np.float32)
    x[0] = np.arange(64) / 2 - 16
    x[1, :32], x[1, 32:] = 0, -0.0
    x[2, 3], x[3, 40], x[4, 50] = np.nan, -np.inf, 32639
    x[5], x[6] = np.float32(1e-34), np.nextafter(np.float32(1e-34), np.float32(0))
    x[7, ::2], x[8, 0] = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    quants, scales = np.empty((12, 64), np.int16), np.empty((12, 2), np.float32)
    for t in range(12):
        fixed.quantize(x[t].ctypes.data, 64, quants[t].ctypes.data, scales[t].ctypes.data)
    with np.errstate(over="ignore"):
        want = fixed_numpy.quantize(x)
    np.testing.assert_array_equal(quants, want.quants)
    np.testing.assert_array_equal(scales, want.scales)
    assert np.abs(quants.astype(np.int64)).max() == 32639


def tile_inputs(rng: np.random.Generator, n: int, n_blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a panel of rows, one of n tokens, and sums, all of random values."""
    rows = rng.integers(-128, 128, (n_blocks, ROW_WORDS, ROWS, 2), dtype=np.int16)
    rows[:, 16:] = normal(rng, n_blocks, 4, ROWS).view(np.int16).reshape(n_blocks, 4, ROWS, 2)
    quants = rng.integers(-32639, 32640, (n, 32 * n_blocks), dtype=np.int16)
    scales = np.abs(normal(rng, n, n_blocks))
    tokens = np.zeros(n_blocks * fixed_tile.TOKEN_WORDS * n, np.float32)
    fixed_tile.pack(quants.ctypes.data, scales.ctypes.data, n, n_blocks, tokens.ctypes.data)
    return rows, tokens, normal(rng, n, ROWS)


@pytest.mark.some(1)
@pytest.mark.skipif(QUADS or not pair_dot(), reason="the tile of this processor is not in assembly")
@pytest.mark.parametrize("n", [1, 3, pytest.param(fixed_tile.TOKENS, marks=pytest.mark.slow)])
def test_the_assembly_of_a_tile_is_its_twin(n: int):
    one, other = (tile_in(fixed_tile.tile_of(n, step)) for step in (fixed_tile._pairs, fixed_tile._plain_pairs))
    for kind in range(4):
        rows, tokens, y = tile_inputs(np.random.default_rng(kind), n, 3)
        found, want = y.copy(), y.copy()
        for run, out in ((one, found), (other, want)):
            run(rows.ctypes.data, tokens.ctypes.data, 3, out.ctypes.data, ROWS, kind)
        np.testing.assert_array_equal(found, want)
        assert not np.array_equal(want, y)


def tile_in(tile: Any) -> Any:
    @jit
    def run(rows: int, tokens: int, n_blocks: int, y: int, y_row: int, kind: int) -> None:
        tile(rows, tokens, n_blocks, y, y_row, kind)

    return run
