"""Products in fixed point with rows as they are stored: every format and count of tokens against the twin, by bits."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

from kernels import blocks as layout

pytest.importorskip("numba")

from kernels.cpu.build import library
from kernels.cpu.formats import blocks_numpy, fixed_rows
from kernels.cpu.formats.format import FORMAT_SCRATCH
from kernels.cpu.products import fixed_gemv, fixed_numpy
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.kernels import load_kernels
from mlx_engine.backends.parameters import Linear, RMSNorm
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight

FORMATS = [name for name in library.FORMATS if name != "float32"]
# Each number of bits, group size and type of scales at least once.
AFFINE = [
    "affine4_g64_bf16", "affine8_g32_f16", "affine3_g128_f32", "affine2_g64_f16", "affine5_g32_bf16", "affine6_g64_f16",
]  # fmt: skip
N_COLUMNS, COUNT, APART = 512, 3, 4


@cache
def eight_rows(name: str) -> Any:
    kernel: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 18)
    return kernel(library.load().panels(name).eight_rows)


def blocks_of(name: str, n_weights: int, rng: np.random.Generator) -> tuple[np.ndarray, blocks_numpy.Parts]:
    """Return random blocks, whose scales have many magnitudes, and their parts."""
    affine = library.affine_format(name)
    if affine is None:
        kind = getattr(layout, name.upper())
        columns = {"k": 256, "s": 256}.get(name[-1], 32)
    else:
        bits, columns, scale = affine
        kind = layout.group(columns, bits, scale.upper(), has_biases=True)
    n = n_weights // columns
    made = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind)
    for field in {"d", "m", "dmin"} & set(kind.names or ()):
        values = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 2, n)).astype(np.float32)
        made[field] = values.view(np.uint32) >> 16 if made[field].dtype == np.uint16 else values
    if name == "mxfp4":  # products of larger powers of two are infinite
        made["e"] = rng.integers(100, 140, n)
    data = np.empty(made.nbytes + 1, dtype=np.uint8)[1:]  # at an odd address, as in a file
    data[:] = made.view(np.uint8)
    if affine is None:
        return data, getattr(blocks_numpy, name).parts(made.view(np.uint8))
    return data, blocks_numpy.affine.parts(made.view(np.uint8).reshape(n, -1), *affine)


def tokens(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows with a block of zeros, an outlier, and a NaN in the second row."""
    x = rng.standard_normal((n, N_COLUMNS)).astype(np.float32)
    x[0, 64:96], x[0, 130] = 0, 1e4
    if n > 1:
        x[1, 200] = np.nan
    return x


def products(name: str, data: np.ndarray, n_rows: int, fixed: fixed_numpy.Fixed) -> np.ndarray:
    """Return (T, 4, COUNT + 1) products of four ranges of rows: 0, 3, 6 and 9 are their first ones."""
    n, step = len(fixed.quants), data.size // n_rows
    records = np.empty(N_COLUMNS // 32 * n * fixed_rows.RECORD_BYTES, dtype=np.uint8)
    quants, scales = np.ascontiguousarray(fixed.quants), np.ascontiguousarray(fixed.scales)
    fixed_gemv.pack_records(quants.ctypes.data, scales.ctypes.data, n, N_COLUMNS // 32, records.ctypes.data)
    y = np.full((n, 4, APART), 7.0, dtype=np.float32)
    scratch = np.empty(FORMAT_SCRATCH, dtype=np.uint8)
    rows = [data.ctypes.data + 3 * step * way for way in range(4)]
    eight_rows(name)(
        n, *rows, *[data.ctypes.data + (n_rows - 1) * step] * 4, step, COUNT, N_COLUMNS, records.ctypes.data,
        y.ctypes.data, APART, 4 * APART, 1024, scratch.ctypes.data,
    )  # fmt: skip
    return y


@pytest.mark.some(5)
@pytest.mark.parametrize("name", [*FORMATS, *AFFINE])
def test_eight_rows_are_the_twin(name: str):
    """Three rows of four ranges, the last of which has two: its last row is read again."""
    rng, n_rows = np.random.default_rng(7), 11
    data, parts = blocks_of(name, n_rows * N_COLUMNS, rng)
    x = tokens(2, rng)
    fixed = fixed_numpy.quantize(x)
    expected = fixed_numpy.multiply(parts, n_rows, fixed)
    expected = np.concatenate([expected, expected[:, -1:]], axis=1).reshape(2, 4, COUNT)
    found = products(name, data, n_rows, fixed)[:, :, :COUNT]
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
    for t in range(2):
        alone = products(name, data, n_rows, fixed_numpy.Fixed(fixed.quants[t : t + 1], fixed.scales[t : t + 1]))
        np.testing.assert_array_equal(alone[0, :, :COUNT], expected[t])


def test_records_are_quants_of_halves_and_totals():
    """Quants of even columns come first, or high bytes; a quant is 256 high + low."""
    rng = np.random.default_rng(3)
    fixed = fixed_numpy.quantize(rng.standard_normal((1, N_COLUMNS)).astype(np.float32))
    records = np.zeros((N_COLUMNS // 32, fixed_rows.RECORD_BYTES), dtype=np.uint8)
    fixed_gemv.pack_records(fixed.quants.ctypes.data, fixed.scales.ctypes.data, 1, N_COLUMNS // 32, records.ctypes.data)
    packed, halves = records[:, : fixed_rows.SCALE], fixed.quants.reshape(-1, 2, 16)
    if fixed_rows.DIGITS:
        high, low = (packed.view(np.int8).reshape(-1, 2, 2, 16)[:, :, i].astype(np.int16) for i in range(2))
        np.testing.assert_array_equal(256 * high + low, halves)
    else:
        even_first = halves.reshape(-1, 2, 8, 2).swapaxes(2, 3).reshape(-1, 32)
        np.testing.assert_array_equal(packed.view(np.int16), even_first)
    totals = records[:, fixed_rows.INT_TOTAL : fixed_rows.INT_HALF_TOTALS + 8].view(np.int32)
    sums = halves.sum(axis=2, dtype=np.int32)
    of_whole, of_halves = fixed_rows.TIMES_OF_WHOLE * sums.sum(axis=1), fixed_rows.TIMES_OF_HALVES * sums
    np.testing.assert_array_equal(totals, np.column_stack([of_whole, of_halves]))


@cache
def backend() -> CompiledBackend:
    found = load_kernels()
    assert found is not None
    return CompiledBackend(found, "parallel", 3, "i16")


@pytest.mark.parametrize(("kind", "n_rows"), [("Q4_0", 331), ("Q4_K", 1), ("Q8_0", 70), ("Q6_K", 64)])
def test_layers_of_one_to_eleven_tokens_are_the_twin(kind: str, n_rows: int):
    """Rows that three threads divide; tiles multiply eleven tokens, seven or three, by format and processor."""
    rng, be = np.random.default_rng(n_rows), backend()
    weight = Weight.pack("w", rng.standard_normal((n_rows, N_COLUMNS)), BY_NAME[kind])
    matrix, bias = be.prepare(weight), rng.standard_normal(n_rows).astype(np.float32)
    parts = getattr(blocks_numpy, kind.lower()).parts(np.asarray(matrix.data).view(np.uint8).reshape(-1))
    x = rng.standard_normal((11, N_COLUMNS)).astype(np.float32)
    dots = fixed_numpy.multiply(parts, n_rows, fixed_numpy.quantize(x))
    residual = rng.standard_normal(dots.shape).astype(np.float32)
    for n in (1, 2, 3, 6, 7, 10, 11):
        np.testing.assert_array_equal(be.linear(x[:n], Linear("w", matrix, bias)), dots[:n] + bias)
        added = be.project_add(x[:n], Linear("w", matrix, bias), residual[:n])
        np.testing.assert_array_equal(added, dots[:n] + bias + residual[:n])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K"])
def test_a_gate_of_one_and_two_tokens_has_the_bits_of_more(kind: str):
    """The tiles' products of the same rows, with a norm before."""
    rng, be = np.random.default_rng(9), backend()
    gate, up = (
        Linear("w", be.prepare(Weight.pack("w", rng.standard_normal((75, N_COLUMNS)), BY_NAME[kind]))) for _ in range(2)
    )
    norm = RMSNorm("n", np.linspace(0.5, 2, N_COLUMNS, dtype=np.float32), 1e-6)
    x = rng.standard_normal((3, N_COLUMNS)).astype(np.float32)
    many = be.norm_gate_up(x, norm, gate, up, "silu")
    assert np.isfinite(many).all()
    assert np.ptp(many) > 0
    np.testing.assert_array_equal(be.norm_gate_up(x[:2], norm, gate, up, "silu"), many[:2])
    np.testing.assert_array_equal(be.norm_gate_up(x[2:], norm, gate, up, "silu"), many[2:])
