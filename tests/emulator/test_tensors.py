"""Tensors and products of tensors: right in every layout, and every planted mistake is found with its line."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import CompileError, EmulatorError, Library, TensorError, Unwritten, library, metal_kernel
from kernels.emulator.metal_library import WholeKernel
from tests.emulator.tensors import BUGS, HEAD, REFUSED, ROWS, TILED, Bug

LAYOUTS = range(16)


@cache
def kernels() -> Library:
    """Return the kernels, and each of them again with each mistake, in one file that is compiled once per build."""
    texts = {"tiled": TILED, "rows": ROWS}
    planted = [
        f"{texts[bug.kernel].replace(bug.old, bug.new, 1).replace(f'void {bug.kernel}', f'void {bug.kernel}_{i}')}"
        for i, bug in enumerate(BUGS)
    ]
    return library("".join([HEAD, TILED, ROWS, MORE, *planted]))


@cache
def compiled(build: str) -> dict[str, WholeKernel]:
    found = {name: kernels().function(name) for name in kernels().names}
    kernels().prepare(list(found.values()), build)
    return found


MORE = """
kernel void bound(tensor<device half, dextents<int, 2>> a [[buffer(0)]], tensor<device half, dextents<int, 2>> b,
                  tensor<device float, dextents<int, 2>> c, uint2 at [[threadgroup_position_in_grid]]) {
  constexpr auto descriptor = matmul2d_descriptor(16, 16, static_cast<int>(dynamic_extent));
  matmul2d<descriptor, execution_simdgroups<2>> op;
  auto left = a.slice(0, at.y * 16);
  auto right = b.slice(at.x * 16, 0);
  auto result = c.slice(at.x * 16, at.y * 16);
  op.run(left, right, result);
}

// Every way to reach an element, and the traits.
kernel void elements(device int* x [[buffer(0)]], device int* y [[buffer(1)]], device uchar* nibbles [[buffer(2)]]) {
  auto whole = tensor(x, dextents<int, 2>{4, 3}, array<int, 2>{1, 5});
  auto part = whole.slice<2, 2>(1, 1);
  extents<int, 4, dynamic_extent> mixed(7);
  y[0] = part[0, 0] + 100 * part[array<int, 2>{1, 1}];
  y[1] = whole.get_extent(1) + 10 * part.get_static_extent(0) + 100 * int(mixed.rank_dynamic());
  y[2] = mixed.extent(0) * 10 + mixed.extent(1);
  auto rest = whole.slice(3, 1);
  y[3] = rest.extents().extent(0) * 10 + rest.get_extent(1);
  part[0, 1] = 7;
  y[4] = *whole.slice(2, 2).data_handle();
  auto four = tensor<device int4b_format, dextents<int, 2>, tensor_inline>(nibbles, dextents<int, 2>(4, 2));
  auto two = tensor<device uint2b_format, dextents<int, 1>, tensor_inline>(nibbles, dextents<int, 1>(8));
  auto small = tensor<device metal_fp8_e4m3_format, dextents<int, 1>, tensor_inline>(nibbles, dextents<int, 1>(2));
  y[5] = four[3, 0];
  y[6] = two[5];
  y[7] = int(1000 * small[1]);
  y[8] = is_tensor_inline_v<decltype(part)> + 10 * has_tensor_offset_v<decltype(part)>;
}

// Operands whose elements are all equal lie well in every layout.
kernel void ones(device half* b, device float* y) {
  constexpr auto descriptor = matmul2d_descriptor(16, 16, 16);
  matmul2d<descriptor, execution_simdgroup> op;
  auto Y = tensor(y, dextents<int, 2>(16, 16));
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  auto right = op.get_right_input_cooperative_tensor<half, half, float>();
  right.load(tensor(b, dextents<int, 2>(16, 16)));
  for (ushort i = 0; i < left.get_capacity(); i++)
    if (left.is_valid_element(i)) left[i] = 1;
  auto result = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, result);
  result.store(Y);
}

// Two products, of which the second takes what the first has left in registers, if it lies well.
kernel void chained(device half* a, device half* b, device half* c, device float* y) {
  constexpr auto descriptor = matmul2d_descriptor(16, 16, 16, false, false, true);
  matmul2d<descriptor, execution_simdgroup> op;
  auto A = tensor(a, dextents<int, 2>(16, 16)), B = tensor(b, dextents<int, 2>(16, 16));
  auto C = tensor(c, dextents<int, 2>(16, 16));
  auto Y = tensor(y, dextents<int, 2>(16, 16));
  auto first = op.get_destination_cooperative_tensor<decltype(A), decltype(B), half>();
  auto result = op.get_destination_cooperative_tensor<decltype(A), decltype(C), float>();
  op.run(A, B, first);
  threadgroup half held[256];
  auto H = tensor(held, dextents<int, 2>(16, 16));
  if (op.is_compatible_as_left_input<half, half, float>(first)) {
    auto left = op.get_left_input_cooperative_tensor<half, half, float>(first);
    op.run(left, C, result);
  } else {
    first.store(H);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    op.run(H, C, result);
  }
  result.store(Y);
}

kernel void in_bytes(device int8_t* a, device int8_t* b, device int* y) {
  constexpr auto descriptor = matmul2d_descriptor(16, 32, 32, false, true);
  matmul2d<descriptor, execution_thread> op;
  auto A = tensor(a, dextents<int, 2>(32, 16)), B = tensor(b, dextents<int, 2>(32, 32));
  auto Y = tensor(y, dextents<int, 2>(32, 16));
  op.run(A, B, Y);
}

// A quantised operand as it is stored, and sums of columns.
kernel void four_bits(device half* a, device uchar* b, device float* y, device float* sums) {
  constexpr auto descriptor = matmul2d_descriptor(16, 32, 32, false, true);
  matmul2d<descriptor, execution_simdgroup> op;
  auto A = tensor(a, dextents<int, 2>(32, 16));
  auto B = tensor<device uint4b_format, dextents<int, 2>, tensor_inline>(b, dextents<int, 2>(32, 32));
  auto Y = tensor(y, dextents<int, 2>(32, 16));
  auto S = tensor(sums, dextents<int, 1>(32));
  auto result = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  auto columns = op.get_column_reduction_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  op.run(A, B, result);
  reduce_columns(result, columns);
  result.store(Y);
  columns.store(S);
}
"""


def out(*shape: int) -> Unwritten:
    return Unwritten(shape, np.float32)


def tiled(name: str, sizes: tuple[int, int, int], **how: Any) -> tuple[Any, Any]:
    """Return the result, and what it must be."""
    m, n, k = sizes
    rng = np.random.default_rng(m)
    x, scales = rng.standard_normal((m, k)).astype(np.float16), rng.uniform(1, 2, n).astype(np.float16)
    w = rng.integers(-8, 8, (n, k)).astype(np.int8)
    grid = (-(-n // 32) * 64, -(-m // 16), 1)
    function = compiled(how.get("build", "spaces"))[name]
    found = function(
        [x, w, scales, out(m, n), np.array([m, n, k, 0], np.int32)], grid=grid, threadgroup=(64, 1, 1), **how
    )
    return found[3], (x.astype(np.float64) @ w.T.astype(np.float64)) * scales.astype(np.float64)


def rows(name: str, count: int, **how: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(count)
    q, k = -rng.uniform(0, 1, (count, 16)).astype(np.float16), rng.uniform(0, 1, (32, 16)).astype(np.float16)
    function = compiled(how.get("build", "spaces"))[name]
    found = function([q, k, out(count, 32), count], grid=(-(-count // 16) * 32, 1, 1), threadgroup=(32, 1, 1), **how)
    s = q.astype(np.float64) @ k.T.astype(np.float64)
    return found[2], np.exp(s - s.max(axis=1, keepdims=True))


SIZES = {"tiled": ((16, 32, 32), (21, 40, 27), (5, 9, 5)), "rows": (16, 21)}
RUN: dict[str, Any] = {"tiled": tiled, "rows": rows}


@pytest.mark.some(2)
@pytest.mark.parametrize("kernel", ["tiled", "rows"])
@pytest.mark.parametrize("build", ["spaces", "undefined", "races"])
def test_sound_kernels_are_clean_in_every_layout(kernel: str, build: str) -> None:
    for seed in LAYOUTS if build == "spaces" else (0, 1, 3, 6):
        for size in SIZES[kernel]:
            found, expected = RUN[kernel](kernel, size, build=build, seed=seed)
            np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=f"{size}, seed {seed}")
    assert not compiled(build)[kernel].statistics.notes


def mistake(bug: Bug, name: str) -> tuple[str, str]:
    """Return the first finding, and the line that it names; of wrong values the line that wrote them."""
    for build in ("spaces", "races"):
        for seed in (0, 1, 3):
            for size in SIZES[bug.kernel]:
                try:
                    found, expected = RUN[bug.kernel](name, size, build=build, seed=seed)
                except EmulatorError as error:
                    return str(error), str(error)
                right = np.abs(found - expected) < 1e-2
                if right.all():
                    continue
                place = {"tiled": 3, "rows": 2}[bug.kernel]
                try:
                    RUN[bug.kernel](name, size, build="races", seed=seed, trace=(place, 4 * int(np.argmin(right))))
                except EmulatorError as error:
                    return str(error), str(error)
                writer = compiled("races")[name].statistics.writer
                return "", writer.text if writer else ""
    return "nothing was found", ""


@pytest.mark.some(4)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_every_mistake_is_found_with_its_line(bug: Bug) -> None:
    says, where = mistake(bug, f"{bug.kernel}_{BUGS.index(bug)}")
    assert re.search(bug.says, says) if bug.says else not says, says
    assert re.search(rf"metal, line \d+: `.*{re.escape(bug.line)}", where), where


def test_mistakes_are_in_the_kernels() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30
    for bug in BUGS:
        assert bug.old in {"tiled": TILED, "rows": ROWS}[bug.kernel], bug.name


@pytest.mark.some(1)
@pytest.mark.parametrize(("old", "new", "reason"), REFUSED)
def test_what_metal_refuses(old: str, new: str, reason: str) -> None:
    assert old in TILED
    function = library(HEAD + TILED.replace(old, new, 1)).function("tiled")
    with pytest.raises(CompileError, match=reason):
        function({0: None, 1: None, 2: None, 3: out(1), 4: bytes(16)}, grid=(64, 1, 1), threadgroup=(64, 1, 1))


def test_an_array_is_bound_as_a_tensor() -> None:
    a, b = mx.random.normal((20, 9)).astype(mx.float16), mx.random.normal((9, 33)).astype(mx.float16)
    how = {"grid": (64 * 3, 2, 1), "threadgroup": (64, 1, 1)}
    found = compiled("spaces")["bound"]([a, b, out(20, 33)], **how)[2]
    np.testing.assert_allclose(found, np.array(a.astype(mx.float32) @ b.astype(mx.float32)), atol=1e-2)
    with pytest.raises(TensorError, match="an array of 1 axes for a tensor of 2"):
        compiled("spaces")["bound"]([a.reshape(-1), b, out(20, 33)], **how)


def test_elements_extents_and_traits() -> None:
    x = np.arange(15, dtype=np.int32).reshape(3, 5)
    nibbles = np.array([0x21, 0x83, 0x40, 0x7F], np.uint8)
    found = compiled("spaces")["elements"](
        [x, Unwritten((9,), np.int32), nibbles], grid=(1, 1, 1), threadgroup=(1, 1, 1)
    )
    assert found[1].tolist() == [6 + 100 * 12, 3 + 20 + 100, 47, 12, 12, -8, 0, -5, 1]
    assert found[0][2, 1] == 7


@pytest.mark.parametrize("seed", [0, 1, 2, 95])  # with 95 the first element of the first thread stands for nothing
def test_operands_of_equal_elements_rely_on_no_layout(seed: int) -> None:
    b = np.random.default_rng(0).uniform(-1, 1, (16, 16)).astype(np.float16)
    how = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "seed": seed}
    found = compiled("spaces")["ones"]([b, out(16, 16)], **how)[1]
    np.testing.assert_allclose(found, np.tile(b.astype(np.float64).sum(axis=0), (16, 1)), atol=1e-2)


@pytest.mark.slow
def test_a_result_of_two_simdgroups_is_no_operand_of_one() -> None:
    made = "auto first = op."
    wrong = MORE.replace(made, f"matmul2d<descriptor, execution_simdgroups<2>> both; {made.replace('op', 'both')}", 1)
    with pytest.raises(CompileError, match="expected the destination of a product of one SIMD-group"):
        library(HEAD + wrong).function("chained")(
            [None, None, None, out(16, 16)], grid=(1, 1, 1), threadgroup=(1, 1, 1)
        )


def test_static_extents_alone_make_a_tensor() -> None:
    text = "#include <metal_tensor>\nusing namespace metal;\n"
    text += "kernel void last(tensor<device int, extents<int, 4>> x, device int* y) { y[0] = x[3]; }"
    how: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    found = library(text).function("last")([np.arange(4, dtype=np.int32), Unwritten((1,), np.int32)], **how)
    assert found[1] == [3]


def test_too_many_layouts_are_an_error() -> None:
    one = """{ constexpr auto d = matmul2d_descriptor(%d, 16, 16); matmul2d<d, execution_simdgroup> op;
    auto c = op.get_destination_cooperative_tensor<decltype(a), decltype(a), float>(); sum += c.get_capacity(); }"""
    many = "".join(one % (8 * i) for i in range(1, 66))
    text = f"{HEAD}kernel void many(device half* x, device int* y) {{ int sum = 0;"
    text += f"auto a = tensor(x, dextents<int, 2>(16, 16)); {many} y[0] = sum; }}"
    how: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    with pytest.raises(TensorError, match="more than 64 sizes of cooperative tensors"):
        library(text).function("many")([np.zeros((16, 16), np.float16), Unwritten((1,), np.int32)], **how)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5])
def test_a_result_becomes_an_operand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (rng.uniform(-1, 1, (16, 16)).astype(np.float16) for _ in range(3))
    how = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "seed": seed}
    found = compiled("races")["chained"]([a, b, c, out(16, 16)], build="races", **how)[3]
    first = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    np.testing.assert_allclose(found, first.astype(np.float32) @ c.astype(np.float32), atol=2e-2)


def test_products_of_integers_and_of_stored_bits() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (n, 32)).astype(np.int8) for n in (16, 32))
    how = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    found = compiled("spaces")["in_bytes"]([a, b, Unwritten((16, 32), np.int32)], **how)[2]
    assert np.array_equal(found, a.astype(np.int32) @ b.T.astype(np.int32))
    x, bits = rng.uniform(-1, 1, (16, 32)).astype(np.float16), rng.integers(0, 256, (32, 16)).astype(np.uint8)
    weights = np.stack([bits & 15, bits >> 4], axis=-1).reshape(32, 32)
    for seed in range(5):
        how = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "seed": seed}
        buffers = compiled("spaces")["four_bits"]([x, bits, out(16, 32), out(32)], **how)
        expected = x.astype(np.float64) @ weights.T
        np.testing.assert_allclose(buffers[2], expected, atol=1e-3)
        np.testing.assert_allclose(buffers[3], expected.sum(axis=0), atol=1e-2)


def test_the_layout_of_an_m5_is_a_switch() -> None:
    name = f"rows_{next(i for i, bug in enumerate(BUGS) if bug.name == 'the layout of an M5')}"
    for seed in (0, 2):
        found, expected = rows(name, 21, layout="m5", seed=seed)
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_tensors_in_the_body_of_a_kernel() -> None:
    body = """
      auto A = tensor<const device half, dextents<int, 2>, tensor_inline>(a, dextents<int, 2>(16, 16));
      auto Y = tensor<device float, dextents<int, 2>, tensor_inline>(y, dextents<int, 2>(16, 16));
      threadgroup half held[256];
      for (uint i = thread_index_in_threadgroup; i < 256; i += 32) held[i] = a[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      auto B = tensor<threadgroup half, extents<int, 16, 16>, tensor_inline>(held, extents<int, 16, 16>());
      constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(16, 16, 16);
      mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup> op;
      op.run(A, B, Y);
    """
    header = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
    kernel = metal_kernel("square", ["a"], ["y"], body, header=header)
    a = mx.random.uniform(-1, 1, (16, 16)).astype(mx.float16)
    for seed in (0, 1):
        how: dict[str, Any] = {"output_shapes": [(16, 16)], "output_dtypes": [mx.float32], "seed": seed}
        (y,) = kernel(inputs=[a], grid=(32, 1, 1), threadgroup=(32, 1, 1), **how)
        wide = a.astype(mx.float32)
        assert mx.allclose(y, wide @ wide, atol=1e-3)
