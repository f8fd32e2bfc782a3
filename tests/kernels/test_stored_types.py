"""Every stored type: repacked without a change, multiplied rightly, and in the order of summation of Q8_0."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from kernels import blocks
from kernels.launch import launch, planned, use
from kernels.metal import (
    dense,
    dequantize,
    matvec,
    norm_gate_up,
    norm_project,
    norm_qkv,
    simd_per_row,
    thread_per_output,
)
from kernels.metal import layout as layouts
from kernels.metal.cases import TYPES, cases, numbers, share, stored
from kernels.metal.formats import GROUPS, affine_layout, join_affine, split_q4_0, split_q4_k, split_q6_k, split_q8_0
from kernels.metal.layout import BLOCK, StoredMatrix
from mlx_engine.quant import BY_NAME, group_weight
from mlx_engine.quant import dequantize as defined
from mlx_engine.quant.groups import affine
from tests.kernels.test_metal_kernels import compile_together
from tests.random_blocks import random_groups

SPLIT = {"Q4_0": split_q4_0, "Q4_K": split_q4_k, "Q6_K": split_q6_k}
TYPED = [case for case in cases() if any(type_ in case.label for type_ in TYPES)]


@pytest.fixture(autouse=True)
def in_the_emulator():
    with use("emulator"):
        yield


# ---- repacked ----


def raw_bytes(name: str, n: int, k: int) -> np.ndarray:
    """Any quants and any finite scales, at an odd address, as they lie in a file."""
    kind, rng = getattr(blocks, name), np.random.default_rng(len(name))
    made = rng.integers(0, 256, BY_NAME[name].bytes_for(n * k), dtype=np.uint8).view(kind)
    for field in set(kind.names) & {"d", "dmin"}:
        bits = rng.integers(0, 1 << 16, len(made)).astype(np.uint16).view(np.float16)
        made[field] = np.where(np.isfinite(bits), bits, 0)
    shifted = np.empty(made.nbytes + 1, dtype=np.uint8)
    shifted[1:] = made.view(np.uint8)
    shifted.flags.writeable = False
    return shifted[1:]


@pytest.mark.parametrize("name", SPLIT)
def test_no_weight_of_a_gguf_type_changes(name: str):
    raw = raw_bytes(name, 7, 768)
    matrix = SPLIT[name](raw, (7, 768))
    assert (matrix.shape, matrix.nbytes) == ((7, 768), raw.nbytes)
    want = defined(raw, BY_NAME[name], where=name).reshape(7, 768)
    np.testing.assert_array_equal(np.array(matrix.dequantized()), want)
    ids = mx.array([6, 0, 0])
    np.testing.assert_array_equal(np.array(matrix.dequantized(ids)), want[[6, 0, 0]])
    np.testing.assert_array_equal(np.array(dequantize.dequantize(matrix)), want)


@pytest.mark.some(2)
@pytest.mark.parametrize("scale", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_of_mlx_changes(bits: int, scale: str):
    for group in GROUPS:
        type_ = affine(bits, group, scale)
        weight = random_groups(np.random.default_rng(group), "w", type_.name, 5, 384)
        parts, of = group_weight.split(weight, type_), affine_layout(bits, group, scale)
        assert parts.biases is not None
        matrix = join_affine(of, (5, 384), parts.quants, parts.scales, parts.biases)
        assert (matrix.nbytes, of.name) == (weight.nbytes, type_.name)
        np.testing.assert_array_equal(np.array(matrix.dequantized()), weight.dequantize())
        np.testing.assert_array_equal(np.array(dequantize.dequantize(matrix)), weight.dequantize())


def test_mlx_takes_its_own_quants_as_they_are():
    w = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    for bits, group in ((4, 64), (8, 32)):
        wq, scales, biases = mx.quantize(mx.array(w), group_size=group, bits=bits)
        raw = (np.array(part).view(np.uint8) for part in (wq, scales, biases))
        matrix = join_affine(affine_layout(bits, group, "F32"), (3, 128), *raw)
        assert np.array_equal(np.array(matrix.wq), np.array(wq))
        want = mx.dequantize(wq, scales, biases, group_size=group, bits=bits)
        np.testing.assert_array_equal(np.array(dequantize.dequantize(matrix)), np.array(want))


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: split_q4_0(np.zeros(18, np.uint8), (1, 64)), "split_q4_0: expected 36 bytes for 1 rows of 64 weights"),
        (lambda: split_q4_k(np.zeros(144, np.uint8), (2, 128)), "a multiple of 256, found 144"),
        (lambda: split_q6_k(np.zeros(210, np.int8), (1, 256)), "split_q6_k: expected 210 bytes .* of type int8"),
        (lambda: affine_layout(3, 64, "F16"), "expected 4 or 8 bits, .* found 3, 64 and F16"),
        (lambda: join_affine(affine_layout(4, 64, "F16"), (1, 64), *[np.zeros(2, np.uint8)] * 3), r"\[32, 2, 2\]"),
        (
            lambda: StoredMatrix(affine_layout(4, 64, "F16"), mx.zeros((1, 8), mx.uint32), mx.zeros((1, 2))),
            r"AFFINE4_G64_F16 matrix: expected uint32 quants \(N, K \* 4 / 32\) and float16 scales \(N, K / 64 \* 2\)",
        ),
        (
            lambda: StoredMatrix(affine_layout(4, 64, "BF16"), *[mx.zeros((1, 8), mx.uint32)] * 2),
            r"1 scales for 64 quants, found 1 x 64 quants and scales \(1, 8\)",
        ),
        (
            lambda: simd_per_row.simd_per_row(mx.zeros((1, 32)), split_q4_0(np.zeros(18, np.uint8), (1, 32))),
            "simd_per_row: expected a Q8_0 matrix, found Q4_0",
        ),
        (
            lambda: thread_per_output.thread_per_output(mx.zeros((1, 32)), split_q4_0(np.zeros(18, np.uint8), (1, 32))),
            "thread_per_output: expected a Q8_0 matrix, found Q4_0",
        ),
        (lambda: split_q6_k(np.zeros(210, np.uint8), (1, 256)).scales_and_biases(), "Q6_K matrix: expected"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_named(call: Callable[[], object], wanted: str):
    with pytest.raises(ValueError, match=wanted):
        call()


# ---- multiplied ----


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of these tests, compiled together."""
    with use("emulator"):
        calls = [case.outputs for case in TYPED]
        for type_ in TYPES:
            x, matrix = wide(type_)
            calls += [partial(matvec.matvec, x[:1], matrix), partial(matvec.matvec, x, matrix)]
        compile_together(calls)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_every_type_is_right_in_every_kernel():
    for case in TYPED:
        assert case.error() <= 1, f"{case.kernel}: {case.label}"
    kernels = {case.kernel for case in TYPED}
    assert kernels == {
        "matvec", "norm_project", "norm_qkv", "norm_gate_up", "project_add", "tiles", "embed_rows", "dequantize",
        "prompt_product", "prompt_product_tensors",
    }  # fmt: skip


def test_types_have_the_numbers_of_the_headers():
    text = matvec.KERNEL.header
    (names,) = re.findall(r"enum \{ (TYPE_Q8_0.*?) \};", text)
    kinds = [getattr(layouts, name.removeprefix("TYPE_")) for name in names.split(", ")]
    assert kinds == list(range(len(kinds)))


def wide(type_: str) -> tuple[mx.array, StoredMatrix]:
    """Return vectors and a matrix with two segments of columns, each with a part of a step."""
    rng = np.random.default_rng(9)
    return numbers(rng, (6, 2304), "float16"), stored(rng, 9, 2304, type_)


@pytest.mark.some(2)
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("type_", TYPES)
def test_a_row_has_the_same_bits_in_every_pass(type_: str):
    """Alone and beside others: the tuning differs, too."""
    x, matrix = wide(type_)
    alone = np.concatenate([np.array(matvec.matvec(x[i : i + 1], matrix)) for i in range(6)])
    np.testing.assert_array_equal(np.array(matvec.matvec(x, matrix)), alone)
    if matrix.layout.kind not in (layouts.Q4_0, layouts.Q6_K):
        # Weights are computed first, so the bits are those of float32 weights, whose order tests of `dense` fix.
        np.testing.assert_array_equal(np.array(dense.dense(x[:1].astype(mx.float32), matrix.dequantized())), alone[:1])


def equal_q8_0(matrix: StoredMatrix, scales: np.ndarray) -> StoredMatrix:
    """Return a Q8_0 matrix with the same weights: `scales` (N, K / 32) times whole numbers."""
    made = np.empty(scales.shape, blocks.Q8_0)
    made["d"] = scales
    quants = np.array(matrix.dequantized()).reshape(*scales.shape, BLOCK) / scales[..., None]
    assert np.array_equal(quants, quants.round())
    made["qs"] = quants
    return split_q8_0(made.view(np.uint8).reshape(-1), matrix.shape)


def test_types_without_an_offset_have_the_bits_of_q8_0():
    """The products of sixteen quants are added before they are scaled, as in Q8_0."""
    rng = np.random.default_rng(10)
    x = numbers(rng, (2, 2304))
    d = rng.standard_normal((5, 72)).astype(np.float16)
    made = rng.integers(0, 256, 5 * 72 * 18, dtype=np.uint8).view(blocks.Q4_0)
    made["d"] = d.reshape(-1)
    q4_0 = split_q4_0(made.view(np.uint8), (5, 2304))
    powers = 2.0 ** rng.integers(0, 6, (5, 9, 8))
    of = rng.integers(0, 256, 5 * 9 * 210, dtype=np.uint8).view(blocks.Q6_K)
    of["d"], of["scales"] = d[:, :9].reshape(-1), np.repeat(powers, 2, axis=-1).reshape(-1, 16)
    q6_k = split_q6_k(of.view(np.uint8), (5, 2304))
    for matrix, scales in ((q4_0, d), (q6_k, (d[:, :9, None] * powers).reshape(5, 72))):
        found = np.array(matvec.matvec(x, matrix))
        np.testing.assert_array_equal(found, np.array(matvec.matvec(x, equal_q8_0(matrix, scales.astype(np.float16)))))


def test_matrices_of_several_types_in_one_launch_have_the_bits_of_single_products():
    rng = np.random.default_rng(11)
    x, gain = numbers(rng, (2, 512)), numbers(rng, (512,), mean=1)
    q, k, v = (stored(rng, n, 512, of) for n, of in ((11, "Q4_K"), (6, "AFFINE8_G64_BF16"), (7, "Q6_K")))
    with planned() as launches:
        norm_qkv.norm_qkv(x, gain, 1e-6, q, k, v)
    assert len(launches) == 1
    single = [np.array(norm_project.norm_project(x, gain, 1e-6, matrix)) for matrix in (q, k, v)]
    for found, wanted in zip(norm_qkv.norm_qkv(x, gain, 1e-6, q, k, v), single, strict=True):
        np.testing.assert_array_equal(np.array(found), wanted)
    gate, up = (stored(rng, 9, 512, of) for of in ("Q6_K", "Q4_K"))
    swapped = [np.array(norm_gate_up.norm_gate_up(x, gain, 1e-6, *pair)) for pair in ((gate, up), (up, gate))]
    for found, pair in zip(swapped, ((gate, up), (up, gate)), strict=True):
        assert share(found, norm_gate_up.reference(x, gain, 1e-6, *pair)) <= 1
    assert not np.array_equal(*swapped)


WRONG = [
    ("Q4_0", "-8.0f", "-7.0f"),
    ("Q4_0", "nibbles4(q.y >> 16)", "nibbles4(q.x >> 16)"),
    ("Q4_K", "(low & 15u) | s >> 6 << 4", "low & 15u"),
    ("Q4_K", "low >> 4 | m >> 6 << 4", "low >> 4 | s >> 6 << 4"),
    ("Q4_K", "-(dmin * float(minimum))", "dmin * float(minimum)"),
    ("Q6_K", "at / 16 % 16", "at / 16 % 8"),
    ("Q6_K", "words[2] >> 24", "words[2] >> 16"),
    ("Q6_K", "(const device char*)", "(const device uchar*)"),
    ("AFFINE4_G64_F16", "float(ws[2 * group + 1]));", "0.0f);"),
    ("AFFINE4_G32_BF16", "ws[group] << 16", "ws[group]"),
    ("AFFINE4_G128_F32", "w.q.c = q.c * scale;", "w.q.c = q.c;"),
    ("AFFINE8_G128_F16", "float(ws[2 * group]),", "float(ws[group]),"),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("type_", "right", "wrong"), WRONG)
def test_a_wrong_header_is_wrong(type_: str, right: str, wrong: str):
    matrix = stored(np.random.default_rng(12), 3, 512, type_)
    with planned() as launches:
        dequantize.dequantize(matrix)
    (entry,) = launches
    header = entry.kernel.header.replace(right, wrong)
    assert header != entry.kernel.header
    (y,) = launch(
        replace(entry.kernel, name="mutant", header=header), entry.inputs, template=entry.template, grid=entry.grid,
        threadgroup=entry.threadgroup, output_shapes=entry.output_shapes, output_dtypes=entry.output_dtypes,
    )  # fmt: skip
    assert share(np.array(y), dequantize.reference(matrix)) > 1


def test_a_rounded_product_with_a_scale_of_float32_is_told_from_a_fused_one():
    """MLX rounds `scale * q` before it adds the bias; with float16 and bfloat16 the product is exact."""
    matrix = stored(np.random.default_rng(13), 3, 512, "AFFINE8_G32_F32")
    scales, biases = (np.repeat(np.array(part), 32, axis=1).astype(np.float64) for part in matrix.scales_and_biases())
    quants = np.array(matrix.wq).view(np.uint8)
    once = (scales * quants + biases).astype(np.float32)
    twice = ((scales * quants).astype(np.float32) + biases.astype(np.float32)).astype(np.float32)
    assert not np.array_equal(once, twice)
    np.testing.assert_array_equal(np.array(dequantize.dequantize(matrix)), twice)
