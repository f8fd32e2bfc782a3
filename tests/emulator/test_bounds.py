"""Every read and write past either end of an array is found, for every length, and nothing else is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import (
    EmulatorError,
    MemoryFaultError,
    MetalKernel,
    Unwritten,
    WholeKernel,
    emulate,
    library,
    metal_kernel,
    prepare,
    unavailable,
)
from kernels.emulator.memory import LARGE_GUARD, PAGE, Buffer, _has_large_space
from tests.emulator.test_emulator import X, call, simple

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

ROOT = Path(__file__).parents[2]
LENGTHS = range(1, 41)
# Bytes of an element: its type in Metal, and the dtype of an array of which one element or several make it.
TYPES = {
    1: ("uchar", mx.uint8),
    2: ("half", mx.float16),
    4: ("float", mx.float32),
    8: ("ulong", mx.uint64),
    16: ("float4", mx.float32),
}
# How far threads read and write beside their element.
SOUND, READS, WRITES = (0, 0), ((-1, 0), (1, 0)), ((0, -1), (0, 1))
MISTAKES = (*READS, *WRITES)


@cache
def shifted(size: int, space: str) -> MetalKernel:
    """A kernel whose threads copy an element of so many bytes, from and to a place that `by` shifts."""
    element, dtype = TYPES[size]
    x, y = "x", "y"
    if size > dtype.size:
        x, y = f"((const {space} {element}*)x)", f"((device {element}*)y)"
    source = f"""const int i = thread_position_in_grid.x;
        const {element} value = {x}[i + by[0]];
        {y}[i + by[1]] = value;"""
    return metal_kernel(f"shifted_{size}_{space}", ["x", "by"], ["y"], source)


def copied(size: int, n: int, by: tuple[int, int], **options: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What `n` threads copy, and what they should."""
    dtype = TYPES[size][1]
    x = mx.arange(1, n * size // dtype.size + 1).astype(dtype)
    (y,) = shifted(size, "constant" if x.size < 8 else "device")(
        inputs=[x, mx.array(by)], output_shapes=[x.shape], output_dtypes=[dtype], grid=(n, 1, 1),
        threadgroup=(32, 1, 1), **options,
    )  # fmt: skip
    return np.array(y), np.array(x)


def says(by: tuple[int, int], n: int, size: int) -> str:
    """The message, as a regular expression: buffer, byte, thread and line."""
    what = "read input 'x'" if by[0] else "wrote to output 'y'"
    thread = 0 if min(by) < 0 else n - 1
    at = rf"{size} bytes before its start" if min(by) < 0 else rf"at byte {n * size:,}: just past its end"
    line = 2 if by[0] else 3
    place = rf"threadgroup \({thread // 32}, 0, 0\), thread \({thread % 32}, 0, 0\)"
    return rf"{what} \({n * size:,} bytes\), {at}, (at|near) body, line {line}: .*\n  {place}"


def message(size: int, n: int, by: tuple[int, int], **options: Any) -> str:
    """What the emulator says to a kernel with a mistake."""
    with pytest.raises(MemoryFaultError) as caught:
        copied(size, n, by, **options)
    return str(caught.value)


@pytest.mark.some(1)
@pytest.mark.parametrize("size", TYPES)
def test_every_access_past_either_end_is_found_in_the_build_that_sees_all(size: int):
    for n in LENGTHS:
        for seed in (0, 1):
            found, expected = copied(size, n, SOUND, build="races", seed=seed)
            assert np.array_equal(found, expected)
        for by in MISTAKES:
            assert re.search(says(by, n, size), message(size, n, by, build="races", seed=1 if n > 32 else 0))


@pytest.mark.some(1)
@pytest.mark.parametrize("size", TYPES)
def test_every_access_past_the_end_at_the_guard_is_found_in_any_build(size: int):
    """And all writes, afterwards."""
    for n in LENGTHS:
        for build in ("spaces", "undefined"):
            for guard, at_guard in (("start", -1), ("end", 1)):
                found, expected = copied(size, n, SOUND, build=build, guard=guard)
                assert np.array_equal(found, expected)
                for by in ((at_guard, 0), *WRITES):
                    assert re.search(says(by, n, size), message(size, n, by, build=build, guard=guard))


@pytest.mark.parametrize("n", [1, 3, 12, 13, 33])
def test_a_program_under_emulation_hears_of_both_ends(n: int):
    for step, at in ((1, "just past its end"), (-1, "4 bytes before its start")):
        with emulate() as seen:
            kernel = mx.fast.metal_kernel(
                "next", ["x"], ["y"], f"int i = thread_position_in_grid.x; y[i] = x[i] * x[i] + x[i + {step}];"
            )
            with pytest.raises(MemoryFaultError, match=rf"read input 'x' \({n * 4} bytes\), .*{at}"):
                kernel(
                    inputs=[mx.ones(n)], output_shapes=[(n,)], output_dtypes=[mx.float32], grid=(n, 1, 1),
                    threadgroup=(n, 1, 1),
                )  # fmt: skip
        assert len(seen.findings) == 1


# ---- kernels of .metal files, and threadgroup memory ----

WHOLE = """
#include <metal_stdlib>
using namespace metal;
struct Shift { int read, write; };
template <typename T>
kernel void shift(device const T* x [[buffer(0)]], constant Shift& by [[buffer(1)]], device T* y [[buffer(2)]],
                  threadgroup T* held [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]]) {
  held[int(i) + by.write] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = held[int(i) + by.read];
}
"""
WHOLE += """
struct Block { float scale; float4 values[4]; };
kernel void copy_block(device const Block* x [[buffer(0)]], constant int& at [[buffer(1)]],
                       device Block* y [[buffer(2)]]) { y[0] = x[at]; }
"""
WHOLE += "".join(
    f'template [[host_name("shift_{size}")]] kernel decltype(shift<{name}>) shift<{name}>;\n'
    for size, (name, _) in TYPES.items()
)


@cache
def whole(size: int) -> WholeKernel:
    return library(WHOLE).function(f"shift_{size}")


@pytest.mark.some(1)
@pytest.mark.parametrize("size", TYPES)
def test_every_access_past_either_end_of_threadgroup_memory_is_found(size: int):
    for n in LENGTHS:
        x = np.arange(n * size, dtype=np.uint8)
        for by in (SOUND, *MISTAKES):
            shift = np.array([by], dtype=[("read", "i4"), ("write", "i4")])
            buffers: Mapping[int, Any] = {0: x, 1: shift, 2: Unwritten((n * size,), np.uint8)}
            how: Mapping[str, Any] = {"grid": (n, 1, 1), "threadgroup": (n, 1, 1), "threadgroup_memory": {0: n * size}}
            if by == SOUND:
                assert np.array_equal(whole(size)(buffers, build="races", **how)[2], x)
                continue
            did = "wrote to" if by[1] else "read"
            with pytest.raises(MemoryFaultError, match=rf"{did} threadgroup array 'held' \({n * size} bytes\)"):
                whole(size)(buffers, build="races", **how)


def test_a_structure_that_is_copied_is_one_access():
    copy = library(WHOLE).function("copy_block")
    blocks, how = np.arange(60, dtype=np.float32), {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "build": "races"}
    assert np.array_equal(copy([blocks, 2, Unwritten((20,), np.float32)], **how)[2], blocks[40:])
    for at, where in ((3, "at byte 240: just past its end"), (-1, "80 bytes before its start")):
        with pytest.raises(MemoryFaultError, match=rf"read buffer 0 'x' \(240 bytes\), {where}"):
            copy([blocks, at, Unwritten((20,), np.float32)], **how)
    with pytest.raises(MemoryFaultError, match=r"wrote to buffer 2 'y' \(76 bytes\), at byte \d+: .* past its end"):
        copy([blocks, 2, Unwritten((19,), np.float32)], **how)


@pytest.mark.parametrize("wide", ["float4", "ulong4"])
def test_buffers_of_other_sizes_than_those_of_a_structure_are_where_its_copies_can_be(wide: str):
    text = f"""#include <metal_stdlib>
using namespace metal;
struct block {{ {wide} all; }};
kernel void copy(device const block* x [[buffer(0)]], device block* y [[buffer(1)]], uint i [[thread_position_in_grid]])
{{ block copied = x[i]; y[i] = copied; }}
"""
    x = np.arange(17, dtype=np.float32)
    for build in ("spaces", "undefined", "races"):
        buffers = [x, Unwritten((19,), np.float32)]
        how: Mapping[str, Any] = {"grid": (2, 1, 1), "threadgroup": (1, 1, 1), "build": build}
        copied = library(text).function("copy")(buffers, **how)[1]
        assert np.array_equal(copied[:8], x[:8])


# ---- all that is no plain load or store of an element ----

KERNELS = {
    "a vector that begins inside": (
        "float4 v = ((const device packed_float4*)(x + 1))[1]; y[0] = v.x + v.w;",
        (8,),
        r"read input 'x' \(32 bytes\), at byte 20: the last 4 of 16 bytes are past its end",
    ),
    "a member of a structure": (
        "struct S { float a[3]; }; y[0] = ((const device S*)(x + 6))->a[2];",
        (8,),
        r"read input 'x' \(32 bytes\), at byte 32: just past its end",
    ),
    "an atomic": (
        "y[0] = atomic_fetch_add_explicit((device atomic_uint*)y + 5, 1u, memory_order_relaxed);",
        (8,),
        r"read output 'y' \(20 bytes\), at byte 20: just past its end",
    ),
    "a matrix": (
        "simdgroup_float8x8 m; simdgroup_load(m, x); float2 v = m.thread_elements(); "
        "y[thread_position_in_grid.x % 5] = v.x + v.y;",
        (63,),
        r"at byte 252: just past its end, (at|near) body, line 1",
    ),
    "a number in constant memory": ("y[0] = x[3];", (3,), r"input 'x' \(12 bytes\), at byte 12: just past its end"),
    "an array without elements": ("y[0] = x[0];", (0,), r"read input 'x' \(0 bytes\), at byte 0: just past its end"),
    "an unsigned index below 0": (
        "y[0] = x[thread_position_in_grid.x - 1];",
        (9,),
        r"read input 'x' \(36 bytes\), at byte 17,179,869,180: .* past its end",
    ),
    "a shape": ("y[0] = x_shape[1];", (9,), r"read input 'x_shape' \(4 bytes\), at byte 4: just past its end"),
}  # fmt: skip


@pytest.fixture(scope="module")
def others() -> dict[str, MetalKernel]:
    """All of `KERNELS`, a unit per build."""
    made = {name: simple(source) for name, (source, _, _) in KERNELS.items()}
    for build in ("spaces", "races"):
        inputs = [(made[name], [mx.zeros(shape)], [mx.float32], None) for name, (_, shape, _) in KERNELS.items()]
        prepare(inputs, build=build)
    return made


@pytest.mark.parametrize("build", ["spaces", "races"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kind_of_access_is_checked(name: str, build: str, others: dict[str, MetalKernel]):
    _, shape, expected = KERNELS[name]
    if "17,179" in expected and not _has_large_space():
        pytest.skip("few addresses")
    threads: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    if build == "spaces":
        expected = r"(read|wrote to) (input|output) '\w+' \("
    with pytest.raises(MemoryFaultError, match=expected):
        call(others[name], mx.zeros(shape), (5,), build=build, **threads)


def test_a_number_without_axes_is_no_array():
    assert call(simple("y[0] = x;"), mx.array(3.0), build="races", grid=(1, 1, 1))[0] == 3
    with pytest.raises(MemoryFaultError, match=r"read input 'x' \(4 bytes\), at byte 4: just past its end"):
        call(simple("y[0] = (&x)[1];"), mx.array(3.0), build="races", grid=(1, 1, 1))


@pytest.mark.parametrize("n", [8, 13, 20, 64])
@pytest.mark.parametrize("build", ["spaces", "undefined", "races"])
def test_wide_loads_of_sound_kernels_are_no_mistake(n: int, build: str):
    """Buffers of a GPU begin at multiples of what vectors need; here only those do whose kernel needs it."""
    kernel = simple(
        """const uint i = 4 * thread_position_in_grid.x;
        if (i + 4 <= N) *(device float4*)(y + i) = *(const device float4*)(x + i);
        else for (uint k = i; k < N; k++) y[k] = x[k];"""
    )
    for seed in (0, 1, 2):
        found = call(kernel, X[:n], (n,), template=[("N", n)], build=build, seed=seed, grid=(32, 1, 1))
        assert np.array_equal(found, np.array(X[:n]))


def test_a_load_that_is_misaligned_is_a_mistake_wherever_the_buffer_begins():
    with pytest.raises(EmulatorError, match=r"misaligned access, at body, line 1: .*"):
        call(simple("float4 v = *(const device float4*)(x + 1); y[0] = dot(v, v);"), X[:13], (5,))


def test_no_index_of_32_bits_reaches_another_buffer():
    if not _has_large_space():
        pytest.skip("few addresses")
    one, other = Buffer(PAGE), Buffer(PAGE)
    assert one.guard == other.guard == LARGE_GUARD >= 1 << 36
    assert abs(one.start - other.start) >= 2 * LARGE_GUARD


# ---- what no thread has written ----


def noted(source: str, shape: tuple[int, ...], **options: Any) -> list[str]:
    """The notes on outputs that are not written; 5 threads."""
    kernel = simple(f"const uint i = thread_position_in_grid.x; {source}")
    call(kernel, X, shape, build="races", **{"grid": (5, 1, 1), "threadgroup": (5, 1, 1), **options})
    assert kernel.statistics is not None
    return [str(note) for note in kernel.statistics.notes if note.kind == "not written"]


def test_elements_that_are_not_written_are_counted():
    (note,) = noted("y[i] = x[i];", (13,))
    assert note.startswith("8 of 13 elements of 'y' were not written, the first is 5\n")
    (note,) = noted("y[2 * i + 1] = x[i];", (2, 5))
    assert note.startswith("5 of 10 elements of 'y' were not written, the first is 0\n")


def test_what_is_written_in_part_on_purpose_is_no_note():
    assert not noted("y[i] = x[i];", (13,), init_value=0)
    assert not noted("y[i] = as_type<float>(0xFFFFFFFFu);", (5,))  # as if nobody had


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit addresses")
def test_kernels_run_where_addresses_are_few():
    program = """
import resource
import mlx.core as mx
from kernels.emulator import metal_kernel
sums = metal_kernel("sums", ["x"], ["y"], "threadgroup float held[4]; const int i = thread_position_in_grid.x;"
    "held[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = held[3 - i];")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
for build in ("spaces", "races"):
    how = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "build": build}
    print(sums(inputs=[mx.arange(4).astype(mx.float32)], output_shapes=[(4,)], output_dtypes=[mx.float32], **how))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[array([3, 2, 1, 0], dtype=float32)]\n" * 2
