"""The kernels' own text, run by the emulator: right, and in the same bits where that is promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kernels import launch as door
from kernels.emulator import MetalKernel
from kernels.launch import Launch, counted, launch, planned, use
from kernels.metal import (
    attention,
    dense,
    dequantize,
    embed_rows,
    head_norm_rope,
    matvec,
    norm_gate_up,
    norm_project,
    norm_qkv,
    norm_rows,
    project_add,
    prompt_product_tensors,
    tiles,
)
from kernels.metal.cases import Case, cases, matrix, numbers, paged, share
from kernels.metal.formats import Q8_0Matrix
from kernels.metal.layout import AffineMatrix, StoredMatrix, expanded
from kernels.metal.reference import Expected
from kernels.metal.rows import MOST_VECTORS, Tuning
from mlx_engine.backends.mlx.backend import expanded_rows, stored_rows
from mlx_engine.quant.key_values import fits

KERNELS = sorted({case.kernel for case in cases()})
# A case per kernel that has most of what can go wrong: ragged rows, columns that end early, several tiles of vectors.
SMOKE = {
    "head_norm_rope": "5 tokens, 3 + 1 heads of 256 float16, normed",
    "dequantize": "9 x 544 to float32",
    "embed_rows": "6 of 9 x 544",
    "tiles": "100 x 160, 19 x float32",
    "prompt_product": "65 x 128, 48 x float16",
    "prompt_product_tensors": "65 x 128, 48 x float16",
    "dense": "9 x 520, 6",
    "attention": "6 heads, 2 of keys, 24 wide, pages of 5, 31 and 32 and 1 keys",
    "norm_gate_up": "9 x 544, 6 x float16, silu",
}

EPS = 1e-6
Call = Callable[..., mx.array | Sequence[mx.array]]


@pytest.fixture(autouse=True)
def in_the_emulator():
    with use("emulator"):
        yield


def smoke(kernel: str) -> Case:
    label = SMOKE.get(kernel, "9 x 544, 6 x float16")
    (found,) = [case for case in cases(kernel) if case.label == label]
    return found


def compile_together(calls: Sequence[Callable[[], object]]) -> None:
    """All instantiations of these calls, one unit per kernel: faster than one by one."""
    with planned() as launches:
        for call in calls:
            call()
    kernels: dict[MetalKernel, list[Launch]] = {}
    for entry in launches:
        kernels.setdefault(door.built(entry.kernel, "emulator"), []).append(entry)
    for kernel, entries in kernels.items():
        kernel.prepare([(entry.inputs, entry.output_dtypes, entry.template) for entry in entries])


# ---- right ----


@pytest.mark.parametrize("kernel", KERNELS)
def test_smoke(kernel: str):
    with counted() as counts:
        error = smoke(kernel).error()
    assert error <= 1
    assert counts == {kernel: 1}


@pytest.mark.some(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_order_of_threads_and_no_undefined_behavior(kernel: str):
    entry, expected = smoke(kernel).launch(), smoke(kernel).expected()
    built = door.built(entry.kernel, "emulator")
    found = built(
        inputs=entry.inputs, template=list(entry.template), grid=entry.grid, threadgroup=entry.threadgroup,
        output_shapes=entry.output_shapes, output_dtypes=entry.output_dtypes, seed=5, build="undefined",
    )  # fmt: skip
    assert max(share(np.array(y), wanted) for y, wanted in zip(found, expected, strict=True)) <= 1


@pytest.mark.some(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_two_threads_race(kernel: str):
    """Who touches which byte is watched, and the bits are those of any other order."""
    entry = smoke(kernel).launch()
    built, first = door.built(entry.kernel, "emulator"), None
    for seed in (0, 1, 2):
        found = built(
            inputs=entry.inputs, template=list(entry.template), grid=entry.grid, threadgroup=entry.threadgroup,
            output_shapes=entry.output_shapes, output_dtypes=entry.output_dtypes, seed=seed, build="races",
        )  # fmt: skip
        first = first or found
        # Metal leaves the order of sums open in products of tensors.
        nearly = 2.0**-10 if kernel == "prompt_product_tensors" else 0
        for y, wanted in zip(found, first, strict=True):
            np.testing.assert_allclose(np.array(y), np.array(wanted), rtol=nearly, atol=nearly)


def test_activations_other_than_silu():
    rng = np.random.default_rng(0)
    arguments = numbers(rng, (2, 96)), numbers(rng, (96,), mean=1), 1e-6, matrix(rng, 5, 96), matrix(rng, 5, 96), "gelu"
    found, wanted = norm_gate_up.norm_gate_up(*arguments), norm_gate_up.reference(*arguments)
    assert share(np.array(found), wanted) <= 1
    assert share(np.array(found), norm_gate_up.reference(*arguments[:-1])) > 1


def test_activations_do_not_overflow():
    """Gates far beyond where exp() overflows: SiLU is then 0 or the gate itself."""
    x, gain = mx.ones((1, 32)), mx.ones((32,))
    gate = Q8_0Matrix(mx.array([[0xFFFFFFFF] * 8, [0x01010101] * 8], mx.uint32), mx.ones((2, 1), mx.float16))
    for activation in ("silu", "gelu"):
        y = np.array(norm_gate_up.norm_gate_up(x, gain, 0.0, gate, gate, activation))
        np.testing.assert_allclose(y[0], [(32 * 127) ** 2, 0], rtol=1e-5)


def test_half_tiles_are_inexact_and_within_their_bound():
    rng = np.random.default_rng(1)
    x, weight = numbers(rng, (20, 256)), matrix(rng, 70, 256)
    compile_together([lambda: tiles.tiles(x, weight), lambda: tiles.tiles(x, weight, half_tiles=True)])
    half = np.array(tiles.tiles(x, weight, half_tiles=True))
    assert share(half, tiles.reference(x, weight, half_tiles=True)) <= 1
    assert share(half, tiles.reference(x, weight)) > 10
    assert share(np.array(tiles.tiles(x, weight)), tiles.reference(x, weight)) <= 1


def test_no_norms_leave_lengths_as_they_are():
    rng = np.random.default_rng(2)
    q, k, v = numbers(rng, (3, 32)), numbers(rng, (3, 16)), numbers(rng, (3, 16))
    table = mx.array(head_norm_rope.rotation_table([1.0, 0.5, 0.25, 0.125], 8))
    rotated, kv = head_norm_rope.head_norm_rope(q, k, v, table[2:5], 8)
    lengths = np.linalg.norm(np.array(q).reshape(3, 4, 8), axis=-1).T
    np.testing.assert_allclose(np.linalg.norm(np.array(rotated), axis=-1), lengths, rtol=1e-6)
    np.testing.assert_array_equal(np.array(kv)[1], np.array(v).reshape(3, 2, 8).transpose(1, 0, 2))


def test_positions_of_a_table_continue():
    frequencies = [1.0, 1e-3]
    whole = head_norm_rope.rotation_table(frequencies, 10)
    np.testing.assert_array_equal(head_norm_rope.rotation_table(frequencies, 4, first=6), whole[6:])
    np.testing.assert_allclose(whole[9, 0], [np.cos(9.0), np.sin(9.0)], rtol=1e-7)


def test_unknown_ids_are_no_numbers():
    table = matrix(np.random.default_rng(4), 3, 64)
    rows = np.array(embed_rows.embed_rows(table, mx.array([2, -1, 3, 0], mx.int32)))
    np.testing.assert_array_equal(rows[[0, 3]], expanded(table)[[2, 0]])
    assert np.isnan(rows[[1, 2]]).all()


def test_a_gemv_of_bfloat16_is_rounded_once():
    rng = np.random.default_rng(3)
    x, weight = numbers(rng, (2, 96), "bfloat16"), matrix(rng, 7, 96)
    exact = matvec.matvec(x, weight)
    assert share(np.array(exact), matvec.reference(x, weight)) <= 1
    np.testing.assert_array_equal(np.array(exact), np.array(matvec.matvec(x.astype(mx.float32), weight)))
    assert mx.array_equal(matvec.matvec(x, weight, dtype=mx.bfloat16), exact.astype(mx.bfloat16)).item()


@pytest.mark.parametrize(
    ("macos", "architecture", "expected"),
    [
        ("26.2", "applegpu_g17s", True),
        ("27.0.1", "applegpu_g18p", True),
        ("26.1", "applegpu_g17s", False),
        ("26.2", "applegpu_g16s", False),
        ("26.2", "applegpu_g17p", False),
        ("26.2", "", False),
        ("", "applegpu_g17s", False),
    ],
)
def test_accelerators_are_used_where_mlx_uses_them(macos: str, architecture: str, expected: bool):
    assert prompt_product_tensors.has_accelerators(macos, architecture) == expected


# ---- in the same bits ----


def _plain(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    return matvec.matvec(x, weights[0], tuning=tuning)


def _added(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    residual = mx.broadcast_to(mx.arange(weights[0].shape[0], dtype=mx.float32), (len(x), weights[0].shape[0]))
    return project_add.project_add(x, weights[0], residual, tuning=tuning)


def _floats(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    return dense.dense(x, dequantize.dequantize(weights[0]), tuning=tuning)


def _rows(x: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
    """Vectors, the gain and factors: those of many vectors are taken before."""
    gain = mx.arange(x.shape[1], dtype=mx.float32) / 1000
    if len(x) <= MOST_VECTORS:
        return x, gain, None
    rows, factors = norm_rows.norm_rows(x, gain, EPS)
    return rows, gain, factors


def _normed(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    rows, gain, factors = _rows(x)
    return norm_project.norm_project(rows, gain, EPS, weights[0], factors, tuning=tuning)


def _qkv(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    (rows, gain, factors), (q, k, v) = _rows(x), weights
    return mx.concatenate(norm_qkv.norm_qkv(rows, gain, EPS, q, k, v, factors, tuning=tuning), axis=1)


def _gated(x: mx.array, weights: Sequence[Q8_0Matrix], tuning: Tuning | None) -> mx.array:
    rows, gain, factors = _rows(x)
    return norm_gate_up.norm_gate_up(rows, gain, EPS, weights[0], weights[2], "silu", factors, tuning=tuning)


@pytest.mark.some(2)
@pytest.mark.parametrize("call", [_plain, _added, _floats, _normed, _qkv, _gated], ids=lambda call: call.__name__[1:])
def test_bits_depend_neither_on_the_batch_nor_on_the_tuning(call: Callable[..., mx.array]):
    rng = np.random.default_rng(5)
    # 2,080 columns are two segments, which SIMD-groups share where a kernel lets them.
    x, weights = numbers(rng, (18, 2080)), [matrix(rng, n, 2080) for n in (11, 6, 11)]
    ways = [(1, None), (3, Tuning(1, 8)), (5, Tuning(4, 4)), (8, Tuning(3, 16)), (18, None), (17, Tuning(1, 2))]
    compile_together([lambda n=n, tuning=tuning: call(x[:n], weights, tuning) for n, tuning in ways])
    (first, tuning), *others = ways
    one = np.concatenate([np.array(call(x[i : i + first], weights, tuning)) for i in range(18)])
    for n, tuning in others:
        np.testing.assert_array_equal(np.array(call(x[:n], weights, tuning)), one[:n])


@pytest.mark.parametrize("n_columns", [2080, 4128])
def test_bits_do_not_depend_on_how_many_simdgroups_share_a_row(monkeypatch: pytest.MonkeyPatch, n_columns: int):
    rng = np.random.default_rng(8)
    x, weight = numbers(rng, (2, n_columns)), matrix(rng, 5, n_columns)
    shared = np.array(matvec.matvec(x, weight, tuning=Tuning(2, 8)))
    monkeypatch.setattr(matvec, "k_split", lambda *_: 1)
    np.testing.assert_array_equal(np.array(matvec.matvec(x, weight, tuning=Tuning(2, 8))), shared)


def test_bits_of_tiles_do_not_depend_on_how_many_vectors_there_are():
    rng = np.random.default_rng(6)
    x, weight = numbers(rng, (40, 96)), matrix(rng, 70, 96)
    compile_together([lambda: tiles.tiles(x[:1], weight), lambda: tiles.tiles(x, weight)])
    many = np.array(tiles.tiles(x, weight))
    for n in (1, 7, 16, 17, 33):
        np.testing.assert_array_equal(np.array(tiles.tiles(x[:n], weight)), many[:n])


def test_fused_kernels_have_the_bits_of_what_they_are_made_of():
    rng = np.random.default_rng(7)
    x, gain, residual = numbers(rng, (2, 2080)), numbers(rng, (2080,), mean=1), numbers(rng, (2, 11))
    q, k, v = (matrix(rng, n, 2080) for n in (11, 6, 4))
    added = np.array(matvec.matvec(x, q)) + np.array(residual)
    np.testing.assert_array_equal(np.array(project_add.project_add(x, q, residual)), added)
    rows, factors = norm_rows.norm_rows(x, gain, 1e-6)
    for found, weight in zip(norm_qkv.norm_qkv(x, gain, 1e-6, q, k, v), (q, k, v), strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(norm_project.norm_project(x, gain, 1e-6, weight)))
        apart = np.array(matvec.matvec(rows, weight)) * np.array(factors)[:, None]
        np.testing.assert_array_equal(np.array(found), apart)
    whole, _ = norm_rows.norm_rows(x, gain, 1e-6, True)
    np.testing.assert_array_equal(np.array(whole), np.array(rows) * np.array(factors)[:, None])


# ---- the cases ----


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_cases_of_all_kinds(kernel: str):
    own = cases(kernel)
    assert len({case.label for case in own}) == len(own) >= 24
    launches = [case.launch() for case in own]
    assert {entry.kernel.name for entry in launches} == {kernel}
    if kernel in ("head_norm_rope", "attention", "dense", "norm_rows"):
        return
    stored = StoredMatrix, AffineMatrix
    matrices = [next(a for a in case.arguments() if isinstance(a, stored)).shape for case in own]
    assert {1, 32} <= {n for n, _ in matrices}
    assert any(n % 2 and n > 1 for n, _ in matrices)
    assert 32 in {k for _, k in matrices}
    assert any(k % 512 and k > 512 for _, k in matrices)
    if kernel not in ("dequantize", "embed_rows"):
        inputs = [case.arguments()[0] for case in own]
        is_prompt = kernel.startswith("prompt_product")
        assert {x.dtype for x in inputs} == {mx.float16, mx.bfloat16 if is_prompt else mx.float32}
        assert set(range(1, 9)) <= {len(x) for x in inputs} or kernel == "tiles" or is_prompt
    if kernel in ("matvec", "project_add"):
        assert {dict(entry.template)["KS"] for entry in launches} == {1, 2, 4}


def test_attention_with_a_soft_cap_and_sinks():
    (own,) = [case for case in cases("attention") if "soft cap 50, sinks" in case.label]
    assert own.error() <= 1
    plain = attention.attention(*own.arguments(), page=64, window=40, scale=0.125)
    assert share(np.array(plain), own.expected()[0]) > 100


@pytest.mark.some(1)
@pytest.mark.parametrize("type_", ["f16", "bf16", "q8_0"])
def test_attention_over_rounded_keys_has_the_bits_of_the_same_numbers_in_float32(type_):
    """Decode rows and all rows of a prompt, with whole float4 and with single elements."""
    for heads, lengths in (((4, 2, 32), [40, 3]), ((2, 1, 24), [33])):
        if not fits(heads[2], type_):
            continue
        every = [list(range(n)) for n in lengths]
        q, numbers, *rest = paged(np.random.default_rng(0), heads, 16, lengths, every)
        options = {"page": 16, "window": 9, "scale": 0.125}
        store = stored_rows(numbers, type_)
        found, expected = (
            attention.attention(q, x, *rest, **options) for x in (store, expanded_rows(store, mx.float32))
        )
        assert store.dtype == {"f16": mx.float16, "bf16": mx.bfloat16, "q8_0": mx.uint8}[type_]
        np.testing.assert_array_equal(np.array(found), np.array(expected))


def test_a_case_can_fail():
    wanted = Expected(np.array([1.0, np.nan]), np.array([1e-6, 1e-6]))
    assert share(np.array([1 + 5e-7, np.nan]), wanted) == pytest.approx(0.5)
    assert share(np.array([1 + 3e-6, np.nan]), wanted) == pytest.approx(3)
    for wrong in ([np.nan, np.nan], [1.0, 1.0], [np.inf, np.nan], [1.0]):
        assert share(np.array(wrong), wanted) == np.inf
    exact = Expected(np.ones(2), np.zeros(2))
    assert share(np.ones(2), exact) == 0
    assert share(np.array([1, 1 + 1e-7]), exact) == np.inf


MATVEC = ("matvec", "37 x 2080, 3 x float32")
HALVES = ("attention", "4 heads, 2 of keys, 64 wide, pages of 16, float16, 33 keys")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("where", "right", "wrong"),
    [
        (MATVEC, "load_vector<K>(vectors, m, k, own)", "load_vector<K>(vectors, 0, k, own)"),
        (MATVEC, "ws[at / GROUP]", "ws[at / GROUP / 2]"),
        (MATVEC, "q ^ 0x80808080u", "q ^ 0x80808000u"),
        (MATVEC, "row < N && vector <", "row < N - 1 && vector <"),
        (MATVEC, "WHOLE || k < end", "WHOLE || k < end - 16"),
        (MATVEC, "s < Order<K>::SEGMENTS; s += KS", "s < 1; s += KS"),
        (HALVES, "values = keys + size_t(store_shape[0] - 1) * G * slots * ROW", "values = keys"),
        (HALVES, "from + (i * PARTS + lane) * 4", "from + (i * PARTS + lane / 2) * 4"),
    ],
)
def test_wrong_text_is_wrong(where: tuple[str, str], right: str, wrong: str):
    kernel, label = where
    (case,) = [case for case in cases(kernel) if case.label == label]
    entry, (wanted,) = case.launch(), case.expected()
    text, header = (part.replace(right, wrong) for part in (entry.kernel.source, entry.kernel.header))
    assert (text, header) != (entry.kernel.source, entry.kernel.header)
    (y,) = launch(
        replace(entry.kernel, name="mutant", source=text, header=header), entry.inputs, template=entry.template,
        grid=entry.grid, threadgroup=entry.threadgroup, output_shapes=entry.output_shapes,
        output_dtypes=entry.output_dtypes,
    )  # fmt: skip
    assert share(np.array(y), wanted) > 1


# ---- what MLX makes of them ----


@pytest.mark.parametrize("kernel", KERNELS)
def test_mlx_takes_the_launch_as_one_node(kernel: str, monkeypatch: pytest.MonkeyPatch):
    """Traced, not run: the calls are made as on a Mac, and MLX writes down what it would do."""
    case = smoke(kernel)
    monkeypatch.setattr(door, "unavailable", lambda name: None)
    nodes: list[str] = []

    def note(event: dict[str, object]) -> None:
        if event["type"] == "primitive":
            nodes.append(str(event["name"]))

    with use("metal"):
        mx.export_function(note, lambda: case.outputs())
    assert nodes == ["CustomKernel"]
