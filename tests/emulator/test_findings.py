"""All mistakes and notes of a run, as text and as values; fences; what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import (
    EmulatorError,
    Finding,
    LaunchError,
    LintError,
    MemoryFaultError,
    MetalKernel,
    RaceError,
    UndefinedBehaviorError,
    metal_kernel,
    prepare,
    unavailable,
)
from kernels.emulator import kernel as instances
from kernels.emulator.errors import Place, root_cause
from tests.emulator.test_emulator import X, call, simple

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def mistakes(kernel: MetalKernel, **options: Any) -> tuple[Finding, ...]:
    with pytest.raises(EmulatorError) as caught:
        call(kernel, X, (64,), **options)
    assert all(not finding.is_note for finding in caught.value.findings)
    return caught.value.findings


def noted(kernel: MetalKernel, **options: Any) -> tuple[Finding, ...]:
    call(kernel, X, (64,), **options)
    assert kernel.statistics is not None
    return kernel.statistics.notes


def test_all_faults_of_a_run_are_reported_once():
    lines = [
        "uint i = thread_position_in_grid.x;",
        "if (i > 10)",
        "y[i] = x[i + 60];",
        "if (i == 2)",
        "y[i] = x[i + 99];",
    ]
    source = "\n".join([*lines, "y[i] = 1;"])
    with pytest.raises(MemoryFaultError) as caught:
        call(simple(source), X, (64,))
    first, second = caught.value.findings
    assert [(one.kind, one.place.file, one.place.line) for one in (first, second)] == [
        ("fault", "body", 5),
        ("fault", "body", 3),
    ]
    assert (first.times, second.times) == (1, 53)
    assert str(caught.value).count("also: read input 'x'") == 1


def test_both_sides_of_all_races_are_values():
    source = """threadgroup float a[64], b[64]; uint i = thread_position_in_threadgroup.x;
        a[i] = x[i];
        y[i] = a[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        b[i] = x[i];
        y[i] += b[63 - i];"""
    found = mistakes(simple(source), build="races")
    assert all(one.kind == "race" for one in found)
    lines = {frozenset((one.place.line, one.other.line)) for one in found if one.other}
    assert lines == {frozenset((2, 3)), frozenset((5, 6))}
    one = found[0]
    assert one.other is not None
    assert (one.place.thread[0] < 32) != (one.other.thread[0] < 32) or one.place.thread != one.other.thread


FENCES = [  # what the threads do between a write and a read by another one, and whether the write comes first
    ("threadgroup_barrier(mem_flags::mem_threadgroup)", "t", True),
    ("threadgroup_barrier(mem_flags::mem_device)", "t", False),
    ("threadgroup_barrier(mem_flags::mem_none)", "t", False),
    ("threadgroup_barrier(mem_flags::mem_device)", "y", True),
    ("threadgroup_barrier(mem_flags::mem_threadgroup)", "y", False),
    ("threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)", "y", True),
    ("simdgroup_barrier(mem_flags::mem_threadgroup)", "t", True),
    ("simdgroup_barrier(mem_flags::mem_none)", "t", False),
    ("simd_sum(1.0f)", "t", False),
    ("simd_broadcast_first(1.0f)", "t", False),
]


@pytest.fixture(scope="module")
def fenced() -> list[MetalKernel]:
    kernels = []
    for between, memory, _ in FENCES:
        kernels.append(
            simple(f"""threadgroup float t[32]; uint i = thread_position_in_threadgroup.x; t[i] = 0;
                threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
                {memory}[i] = x[i];
                {between};
                y[32 + i] = {memory}[31 - i];""")
        )
    prepare([(kernel, [X], [mx.float32], None) for kernel in kernels], build="races")
    return kernels


@pytest.mark.parametrize("i", range(len(FENCES)), ids=lambda i: f"{FENCES[i][0]}-{FENCES[i][1]}")
def test_a_barrier_orders_the_memory_that_it_names(i: int, fenced: list[MetalKernel]):
    options: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "build": "races"}
    if FENCES[i][2]:
        assert np.array_equal(call(fenced[i], X, (64,), **options)[32:], np.array(X)[31::-1])
        return
    with pytest.raises(RaceError):
        call(fenced[i], X, (64,), **options)


MATRIX = """threadgroup float t[64]; uint i = thread_index_in_simdgroup;
    t[i] = x[i]; t[i + 32] = x[i + 32];
    BETWEEN
    simdgroup_float8x8 m; simdgroup_load(m, t); simdgroup_store(m, y);"""


def test_a_load_of_a_matrix_orders_nothing():
    options: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "build": "races"}
    right = simple(MATRIX.replace("BETWEEN", "simdgroup_barrier(mem_flags::mem_threadgroup);"))
    assert np.array_equal(call(right, X, (64,), **options), np.array(X))
    with pytest.raises(RaceError, match="read after write of threadgroup array 't'"):
        call(simple(MATRIX.replace("BETWEEN", "")), X, (64,), **options)


LAST_ONE = """uint group = threadgroup_position_in_grid.x;
    y[1 + group] = float(group);
    BEFORE
    device atomic_uint* done = (device atomic_uint*)y;
    if (atomic_fetch_add_explicit(done, 1u, memory_order_relaxed) == 3) {
      BEFORE
      y[5] = y[1] + y[2] + y[3] + y[4];
    }"""
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"


def test_the_last_threadgroup_may_read_what_others_have_published():
    options: dict[str, Any] = {"grid": (4, 1, 1), "threadgroup": (1, 1, 1), "init_value": 0, "build": "races"}
    assert call(simple(LAST_ONE.replace("BEFORE", FENCE)), X, (6,), **options)[5] == 6
    with pytest.raises(RaceError, match="no barrier orders threadgroups"):
        call(simple(LAST_ONE.replace("BEFORE", "")), X, (6,), **options)


def test_notes_end_nothing():
    same, rest = noted(simple("y[0] = 7.0f;"), build="races")
    assert (same.kind, same.is_note, same.times) == ("same value", True, 63)
    assert (rest.kind, rest.is_note) == ("not written", True)
    assert rest.text.startswith("63 of 64 elements of 'y' were not written, the first is 1\n")
    (unwritten,) = noted(
        simple("threadgroup float t[64]; uint i = thread_position_in_grid.x; y[i] = t[i];"), build="races"
    )
    assert (unwritten.kind, unwritten.times) == ("unwritten", 64)
    assert "read threadgroup array 't' (256 bytes), at byte 0, which no thread has written" in unwritten.text


@pytest.mark.parametrize(
    "body", ["max(t[i], 0.0f)", "min(t[i], 0.0f)", "clamp(t[i], 0.0f, 1.0f)", "fmax(0.0f, t[i])", "simd_max(t[i])"]
)
def test_maxima_keep_what_nobody_has_written(body: str):
    found = call(simple(f"threadgroup float t[64]; uint i = thread_position_in_grid.x; y[i] = {body};"), X, (64,))
    assert np.isnan(found).all()


def test_a_maximum_drops_other_nans():
    found = call(simple("float n = x[0] / x[0]; y[0] = max(n, 3.0f) + fmin(4.0f, n) + clamp(-n, 0.0f, 1.0f);"), X)
    assert found[0] == 7


def test_one_thread_prints(capsys: pytest.CaptureFixture[str]):
    source = 'uint i = thread_position_in_grid.x; y[i] = x[i]; os_log_default.log("thread %u has %g", i, x[i]);'
    call(simple(source), X, (64,), print_from=(37, 0, 0))
    assert capsys.readouterr().out == "thread 37 has 37\n"


@pytest.mark.slow
def test_overloads_and_templates_of_one_name_are_no_recursion(monkeypatch: pytest.MonkeyPatch):
    """Looked for when a kernel is compiled, and here also if it was compiled before."""
    library = instances.kernel_library

    def anew(source: str, build: Any, check: Callable[[], None] | None) -> object:
        if check is not None:
            check()
        return library(source, build, check)

    monkeypatch.setattr(instances, "kernel_library", anew)
    header = """
        float twice(float v) { return v + v; }
        float2 twice(float2 v) { return float2(twice(v.x), twice(v.y)); }
        template <int N> float power(float v) { return v * power<N - 1>(v); }
        template <> float power<0>(float v) { return 1.0f; }
        float odd(float v); float even(float v) { return v <= 0 ? 1.0f : odd(v - 1); }
        float odd(float v) { return v <= 0 ? 0.0f : EVEN(v - 1); }
    """
    body = "y[0] = twice(float2(1, 2)).y + power<3>(2) + odd(3);"
    assert call(simple(body, header=header.replace("EVEN", "abs")), X)[0] == 4 + 8 + 1 + 1
    with pytest.raises(LintError, match=r"`(even|odd)` calls itself"):
        call(simple(body, header=header.replace("EVEN", "even")), X)


def test_kernels_are_named_in_errors_of_their_text():
    with pytest.raises(LintError, match="kernel 'static' is not valid in Metal"):
        call(metal_kernel("static", ["x"], ["y"], "static threadgroup float t[2]; y[0] = t[0];"), X)


def test_a_write_beside_an_output_has_its_line_and_thread():
    (found,) = mistakes(simple("const int i = thread_position_in_grid.x;\nif (i == 7) y[i - 9] = x[i];\ny[i] = x[i];"))
    assert "8 bytes before its start, at body, line 2" in str(found)
    assert (found.place.thread, found.place.line) == ((7, 0, 0), 2)


def test_the_writer_of_an_element():
    kernel = simple("const uint i = thread_position_in_grid.x;\nif (i % 2 == 0) y[i] = x[i];")
    for index, says in ((6, r"thread \(6, 0, 0\), lane 6 wrote it last, at body, line 2"), (7, "no thread wrote it; ")):
        call(kernel, X, (64,), build="races", trace=("y", index))
        assert kernel.statistics is not None
        assert re.search(says, str(kernel.statistics.writer))
    with pytest.raises(LaunchError, match=r"trace .*expected one of y and an index from 0 on, in the build 'races'"):
        call(kernel, X, (64,), trace=("y", 0))


def test_the_writer_of_an_atomic():
    kernel = metal_kernel(
        name="count", input_names=["x"], output_names=["y"], atomic_outputs=True,
        source="atomic_fetch_add_explicit(&y[thread_position_in_grid.x / 32], x[0], memory_order_relaxed);",
    )  # fmt: skip
    kernel(
        inputs=[X], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(2,)], output_dtypes=[mx.float32],
        init_value=0, build="races", trace=("y", 1),
    )  # fmt: skip
    assert kernel.statistics is not None
    assert "lane 31 wrote it last, at body, line 1" in str(kernel.statistics.writer)


def test_an_index_beyond_a_private_array_is_the_cause_of_another_error():
    place = Place((0, 0, 0), (0, 0, 0), "body", 1)
    fault, overflow, shift = (
        MemoryFaultError("fault"),
        UndefinedBehaviorError("index beyond"),
        UndefinedBehaviorError(""),
    )
    fault.findings = (Finding("fault", False, "fault", place),)

    def repeat(error: EmulatorError | None) -> Any:
        def run(build: str) -> None:
            assert build == "undefined"
            if error:
                raise error

        return run

    assert root_cause(fault, "spaces", repeat(overflow)) is overflow
    for other in (shift, RaceError(), None):
        assert root_cause(fault, "spaces", repeat(other)) is fault
    assert root_cause(fault, "undefined", repeat(overflow)) is fault
