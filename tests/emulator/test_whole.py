"""Whole kernels with signatures of their own, one feature of Metal at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import CompileError, LaunchError, Library, MemoryFaultError, RaceError, Unwritten, library
from kernels.emulator.metal_text import Rewriter, parameters, without_twins
from tests.emulator.whole import SOURCE

ARGUMENTS = np.dtype([("n", "i4"), ("scale", "f4"), ("offsets", "i8", 2)], align=True)


@cache
def kernels() -> Library:
    """Return the kernels of our own, read when the first test runs: importing this file must be fast."""
    return library(SOURCE)


def run(name: str, buffers: Any, threads: int = 32, group: int = 32, *, constants: Any = None, **how: Any) -> Any:
    function = kernels().function(name, constants)
    return function(buffers, grid=(threads, 1, 1), threadgroup=(group, 1, 1), **how)


def out(*shape: int, dtype: Any = np.float32) -> Unwritten:
    return Unwritten(shape, dtype)


def test_kernels_have_their_host_names() -> None:
    assert {"scale_float", "scale_half", "places", "renamed"} <= set(kernels().names)
    assert "scale" not in kernels().names, "a template is no kernel"


@pytest.mark.parametrize("build", ["spaces", "undefined", "races"])
def test_structures_threadgroup_memory_and_function_constants(build: str) -> None:
    x = np.arange(40, dtype=np.float32)
    given = np.array((40, 3.0, (1, 2)), ARGUMENTS)
    buffers = [x, given, out(40)]
    how = {"threadgroup_memory": {0: 32 * 4}, "constants": {3: True}, "build": build}
    assert run("scale_float", buffers, 64, **how)[2] == pytest.approx((x * 3 + 2) * 2)
    assert run("scale_float", [x, given.tobytes(), out(40)], 64, **how)[2] == pytest.approx((x * 3 + 2) * 2)


def test_a_template_for_another_type_and_another_constant() -> None:
    x, given = mx.arange(8).astype(mx.float16), np.array((8, 2.0, (0, 1)), ARGUMENTS)
    found = run("scale_half", [x, given, out(8, dtype=mx.float16)], threadgroup_memory={0: 64}, constants={"twice": 0})
    assert isinstance(found[2], mx.array)
    assert found[2].dtype == mx.float16
    assert found[2].tolist() == [2.0 * i + 1 for i in range(8)]


def test_an_optional_constant() -> None:
    assert run("optional", [out(1, dtype=np.int32)])[0].tolist() == [7]
    assert run("optional", [out(1, dtype=np.int32)], constants={4: 9})[0].tolist() == [9]


def test_attributes_of_fewer_dimensions_and_narrower_types() -> None:
    found = run("places", [out(64, 4, dtype=np.int32)], 64)[0]
    expected = [[i, i % 32, i // 32, i % 32] for i in range(64)]
    assert found.tolist() == expected


def test_structures_are_copied_out_of_buffers_and_have_member_functions() -> None:
    kind = np.dtype([("low", "f4"), ("high", "f4")])
    items = np.array([(i, 10 * i) for i in range(32)], kind)
    written = run("middles", {0: items, 2: out(32), 1: Unwritten((32,), kind)})
    assert written[2].tolist() == [5.5 * i for i in range(32)]
    assert written[1]["low"].tolist() == [10.0 * i for i in range(32)]


def test_constant_arrays_and_array_parameters() -> None:
    assert run("weighted", [np.arange(3, dtype=np.int64), out(1)], 1, 1)[1].tolist() == [0 * 2 + 1 * 3 + 2 * 5]


def test_what_a_header_adds_to_namespace_metal() -> None:
    assert run("renamed", [out(1), 2.5], 1, 1)[0].tolist() == [7.5]


def test_threadgroup_memory_is_not_initialised() -> None:
    with_initialiser = run("initialised", [out(32)])[0]
    assert np.isnan(with_initialiser[1:]).all()
    assert with_initialiser[0] == 1.0


def test_vectors_by_value_matrices_and_packed_vectors() -> None:
    packed = np.arange(6, dtype=np.float32)
    found = run("vectors", [packed, out(8)], 1, 1)[1]
    assert found.tolist() == [3.0, 4.0, 5.0, 2.0, 7.0, 30.0, 1.0, 4.0]


@pytest.mark.parametrize("build", ["spaces", "undefined", "races"])
def test_what_published_kernels_write(build: str) -> None:
    x = np.arange(1, 9, dtype=np.float32)
    found = run("unusual_float", [x, None, out(4), 0], 1, 1, build=build)[2]
    assert found.tolist() == [21.0, 8.0, 7.0, 4328.0]


def test_conversions_of_what_a_pointer_points_to_and_lists_that_are_no_vectors() -> None:
    found = run("converted", [np.array([1, 2, 4, 8], np.int32), out(4)], 1, 1)[1]
    assert found.tolist() == [7.0, 8.0, 652.0, 4321.0]


def test_the_library_beyond_the_basics() -> None:
    found = run("functions", [out(8)], 1, 1)[0]
    assert found == pytest.approx([8.0, 3.0, 1.0, np.pi / 4, 1.0, 1.0, 2.0, np.nextafter(np.float32(1), np.float32(2))])


def test_the_same_array_twice_is_one_buffer() -> None:
    x = np.arange(32, dtype=np.float32)
    assert run("same", [x, x, out(1, dtype=np.int32)])[2].tolist() == [1]
    assert run("same", [x, x.copy(), out(1, dtype=np.int32)])[2].tolist() == [0]


def test_mistakes_have_their_line() -> None:
    x, given = np.zeros(40, np.float32), np.array((40, 1.0, (0, 0)), ARGUMENTS)
    with pytest.raises(MemoryFaultError, match=r"buffer 2 'y' \(128 bytes\)(.|\n)*y\[i\] = "):
        run("scale_float", [x, given, out(32)], 64, threadgroup_memory={0: 128}, constants={3: False})
    with pytest.raises(MemoryFaultError, match="threadgroup array 'held'"):
        run("scale_float", [x, given, out(40)], 64, threadgroup_memory={0: 64}, constants={3: False})
    with pytest.raises(RaceError, match="metal, line"):
        run("racing", [out(1, dtype=np.int32)], build="races")


def test_the_writer_of_a_byte_can_be_traced() -> None:
    head = "kernel void twice(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {"
    text = f"{head}\n  y[i / 2 - 1] = 1;\n}}"
    kernel = library(text).function("twice")
    how = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1)}
    with pytest.raises(MemoryFaultError, match=r"past its end|before its start|belongs to no buffer"):
        kernel([out(4)], **how)
    kernel = library(text.replace(" - 1", "")).function("twice")
    kernel([out(4)], **how, build="races", trace=(0, 8))
    assert kernel.statistics is not None
    assert "thread (5, 0, 0), lane 5 wrote it last, at metal, line 2" in str(kernel.statistics.writer)


def test_calls_that_do_not_fit_are_refused() -> None:
    x, given = np.zeros(8, np.float32), np.array((8, 1.0, (0, 0)), ARGUMENTS)
    with pytest.raises(LaunchError, match=r"function constant 3 \('twice', bool\), which has no value"):
        run("scale_float", [x, given, out(8)], threadgroup_memory={0: 128})
    with pytest.raises(LaunchError, match=r"threadgroup_memory: expected bytes also of 0 \('held'\)"):
        run("scale_float", [x, given, out(8)], constants={3: True})
    with pytest.raises(LaunchError, match=r"expected also 2 \('y'\)"):
        run("scale_float", [x, given], constants={3: True}, threadgroup_memory={0: 128})
    with pytest.raises(LaunchError, match=r"expected a kernel such as(.|\n)*found 'scale'"):
        kernels().function("scale")
    with pytest.raises(LaunchError, match="function constant 99: expected one of 3"):
        kernels().function("places", {99: 1})
    with pytest.raises(LaunchError, match=r"buffer 1 \('args', Arguments\)"):
        run("scale_float", [x, 3, out(8)], constants={3: True}, threadgroup_memory={0: 128})


def test_a_file_with_includes(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "twice.h").write_text("#pragma once\ninline float twice(float x) { return x + x; }\n")
    file = tmp_path / "kernels.metal"
    file.write_text(
        '#include <metal_stdlib>\n#include "deep/twice.h"\n'
        "kernel void doubled(device float* y, uint i [[thread_position_in_grid]]) { y[i] = twice(y[i]); }\n"
    )
    (function,) = (library(file).function(name) for name in library(file).names)
    y = np.arange(4, dtype=np.float32)
    assert function([y], grid=(4, 1, 1), threadgroup=(4, 1, 1))[0].tolist() == [0, 2, 4, 6]
    assert y.tolist() == [0, 1, 2, 3], "the given array is unchanged"
    with pytest.raises(MemoryFaultError, match=r"near kernels.metal, line 3: `kernel void doubled"):
        function([y], grid=(8, 1, 1), threadgroup=(8, 1, 1))


def test_text_without_kernels_and_parameters_of_other_stages() -> None:
    with pytest.raises(CompileError, match="expected functions `kernel void NAME"):
        library("inline float f() {\n return 1; }\n")
    with pytest.raises(CompileError, match="'image': expected a buffer"):
        library("kernel void f(texture2d<float> image [[texture(0)]]) {\n}\n")


def test_buffers_without_an_index_get_the_lowest_that_is_free() -> None:
    listed = (
        "device float* a, constant int& b [[buffer(2)]], device const half* c, threadgroup int* d, "
        "uint e [[thread_index_in_simdgroup]]"
    )
    found = [(one.name, one.role, one.slot, one.is_written) for one in parameters("f", listed)]
    assert found == [
        ("a", "buffer", 0, True),
        ("b", "buffer", 2, False),
        ("c", "buffer", 1, False),
        ("d", "threadgroup", 0, True),
        ("e", "attribute", 0, False),
    ]


def test_functions_for_each_address_space_stay_once() -> None:
    text = "struct S {\n  int f() const thread { return 1; }\n  int f() const device { return 1; }\n};\n"
    kept = without_twins(text)
    assert kept.count("return 1") == 1
    assert kept.count("\n") == text.count("\n")
    different = "int f(device int* p) { return 1; }\nint f(device float* p) { return 1; }\n"
    assert without_twins(different) == different


def test_conversions_are_by_value() -> None:
    rewriter = Rewriter("template <typename T> void f() {}")
    assert rewriter.rewritten("(T)x + sizeof(T)") == "metal::msl_to<T>{}->*x + sizeof(T)"
    assert rewriter.rewritten("T(a, b)") == "metal::msl_construct<T>(a, b)"
    assert rewriter.rewritten("int2 at(a, b);") == "int2 at = metal::msl_construct<int2>(a, b);"
