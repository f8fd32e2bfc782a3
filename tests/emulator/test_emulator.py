"""How the emulator runs kernels: orders, buffers, errors and what they leave behind."""

from __future__ import annotations

import gc
import os
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import (
    ConvergenceError,
    MemoryFaultError,
    MetalKernel,
    RaceError,
    metal_kernel,
    prepare,
    unavailable,
)
from kernels.emulator.compiler import BUILDS
from kernels.emulator.memory import PAGE, RESIDENT, Pool, pool
from tests.emulator import matvec

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def call(kernel: MetalKernel, x: Any, shape: tuple[int, ...] = (4,), **options: Any) -> np.ndarray[Any, Any]:
    """64 threads unless told otherwise."""
    options = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), **options}
    (y,) = kernel(inputs=[x], output_shapes=[shape], output_dtypes=[mx.float32], **options)
    return np.array(y)


def simple(source: str, **options: Any) -> MetalKernel:
    return metal_kernel("simple", ["x"], ["y"], source, **options)


X = mx.arange(64, dtype=mx.float32)
COPY = "y[thread_position_in_grid.x] = x[thread_position_in_grid.x];"

# ---- orders ----

ORDER = "y[atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed) + 1] = {what};"


def order(what: str, seed: int, threads: int, threadgroup: int) -> list[float]:
    kernel = simple(ORDER.format(what=what))
    found = call(
        kernel, X, (threads + 1,), grid=(threads, 1, 1), threadgroup=(threadgroup, 1, 1), seed=seed, init_value=0
    )
    return found[1:].tolist()


@pytest.mark.parametrize(
    ("what", "threads", "threadgroup"),
    [
        ("thread_position_in_grid.x", 32, 32),  # lanes
        ("thread_position_in_grid.x / 32", 1024, 1024),  # SIMD-groups
        ("thread_position_in_grid.x", 101, 1),  # threadgroups
    ],
)
def test_seeds_are_orders(what: str, threads: int, threadgroup: int):
    in_order, backwards, shuffled, again, other = (order(what, seed, threads, threadgroup) for seed in (0, 1, 2, 2, 3))
    assert in_order == sorted(in_order)
    assert backwards == in_order[::-1]
    assert shuffled == again
    assert sorted(shuffled) == sorted(other) == in_order
    assert len({tuple(o) for o in (in_order, backwards, shuffled, other)}) == 4


def test_simdgroups_run_as_far_as_they_can():
    """The second finds nothing of what the first would write after their barrier."""
    source = """
        threadgroup float seen[2];
        uint group = simdgroup_index_in_threadgroup;
        if (thread_index_in_simdgroup == 0) seen[group] = float(group);
        y[group] = seen[1 - group];
    """
    first, second = (call(simple(source), X, (2,), seed=seed) for seed in (0, 1))
    assert np.isnan(first[0])
    assert first[1] == 0
    assert second[0] == 1
    assert second[1] > 1e36  # what threadgroup memory is full of in this order


def test_statistics_count():
    given = matvec.problem(8, 512)
    kernel = matvec.kernel()
    matvec.run(kernel, given)
    found = kernel.statistics
    assert found is not None
    assert (found.threads, found.threadgroups) == (128, 2)
    assert found.simd_operations == 128 * matvec.ROWS
    assert found.barriers == 128 * 2
    assert found.switches < 2 * (found.threads + found.simd_operations + found.barriers)  # lanes hand over directly
    assert "threads=128" in repr(found)


# ---- races ----

RACES = """
    threadgroup float t[64];
    const uint i = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    t[i] = x[i];
    {between}
    y[i] = t[0];
"""
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
ALONG = "simdgroup_barrier(mem_flags::mem_threadgroup);"


BETWEEN = [
    (MEET, False),
    ("", True),
    (ALONG, True),  # the other SIMD-group is not held back
    (f"{MEET} float all = t[i] + t[63 - i]; {MEET} t[i] = all; {MEET}", False),
    (f"{MEET} float all = t[i] + t[63 - i]; t[i] = all; {MEET}", True),
    (f"{ALONG} float one = t[group * 32]; {ALONG} if (lane == 0) t[i] = one; {MEET}", False),
    (f"{MEET} float one = t[0]; {ALONG} if (i == 0) t[0] = one + 1.0f; {MEET}", True),
    (f"{MEET} if (lane == 3) t[0] = float(i); {MEET}", True),
    (f"{MEET} if (i == 3) t[0] = 5.0f; {MEET}", False),
    (f"{MEET} ((threadgroup half*)t)[63 - i] = half(1.0f); {MEET}", False),  # neighbours in one word
    (f"{MEET} atomic_fetch_add_explicit((threadgroup atomic_int*)t, 1, memory_order_relaxed); {MEET}", False),
]


@pytest.fixture(scope="module")
def racers() -> dict[str, MetalKernel]:
    kernels = {between: simple(RACES.replace("{between}", between)) for between, _ in BETWEEN}
    prepare([(kernel, [X], [mx.float32], None) for kernel in kernels.values()], build="races")
    return kernels


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("between", "races"), BETWEEN)
def test_what_is_a_race(between: str, races: bool, seed: int, racers: dict[str, MetalKernel]):
    if not races:
        call(racers[between], X, (64,), build="races", seed=seed)
        return
    with pytest.raises(RaceError, match=r"(?s)race: .* of threadgroup array 't'.*body, line [56]"):
        call(racers[between], X, (64,), build="races", seed=seed)


def test_threadgroups_race_in_device_memory():
    call(simple(COPY), X, (64,), build="races", threadgroup=(8, 1, 1))
    with pytest.raises(RaceError, match=r"output 'y'.*\n  threadgroup \(0, 0, 0\), .* wrote it at body, line 1"):
        call(
            simple("y[thread_position_in_threadgroup.x] = x[thread_position_in_grid.x];"),
            X,
            build="races",
            threadgroup=(4, 1, 1),
        )


# ---- lanes that are not there ----

PARTIAL = "if (thread_index_in_simdgroup < 20) return; y[0] = simd_sum(1.0f);"


def test_lanes_that_have_returned_are_left_out_unless_all_are_wanted():
    assert call(simple(PARTIAL), X)[0] == 12
    with pytest.raises(ConvergenceError, match=r"20 lane\(s\) of the SIMD-group have returned"):
        call(simple(PARTIAL), X, lanes="all")


DIVERGENT = [
    ("if (lane < 8) { y[i] = simd_sum(x[i]); } else { y[i] = simd_max(x[i]); }", [28.0] * 8 + [31.0] * 24),
    ("float s = 0; if (lane % 2)\n s = simd_sum(1.0f);\n y[i] = s + simd_sum(1.0f);", [32.0, 48.0] * 16),
    ("float s = 0; for (uint k = lane; k < 40; k += 32)\n s += simd_sum(1.0f);\n y[i] = s + 100 * simd_sum(1.0f);",
     [3240.0] * 8 + [3232.0] * 24),
    ("if (lane > 4)\n y[i] = simd_is_first() ? 1.0f : simd_broadcast_first(x[i]);\n else y[i] = simd_all(lane < 5);",
     [1.0] * 6 + [6.0] * 26),
    ("y[i] = lane < 3 ? 0.0f : float(popcount(uint(simd_active_threads_mask().operator ulong())));",
     [0.0] * 3 + [29.0] * 29),
    ("y[i] = lane > 2 ? simd_prefix_inclusive_sum(1.0f) : -1.0f;", [-1.0] * 3 + [float(n) for n in range(1, 30)]),
    ("y[i] = simd_shuffle_down(x[i], 2) - simd_shuffle_up(x[i], 3);",
     [2.0] * 3 + [5.0] * 27 + [3.0] * 2),
    ("if (lane % 4 > 1)\n y[i] = quad_sum(x[i]) + 1000 * quad_broadcast_first(x[i]);\n else y[i] = 0;",
     [v for q in range(0, 32, 4) for v in (0, 0, *[1000 * (q + 2) + 2 * q + 5] * 2)]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "want"), DIVERGENT)
def test_simd_operations_are_over_the_lanes_that_come_to_them(body: str, want: list[float]):
    kernel = simple("uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n" + body)
    for seed in (0, 1, 2):
        assert call(kernel, X, (32,), grid=(32, 1, 1), threadgroup=(32, 1, 1), seed=seed).tolist() == want


def pairwise(first: int, lanes: int) -> MetalKernel:
    """The sum of the first lanes, in lane 0."""
    return simple(f"""uint i = thread_index_in_simdgroup; float v = x[i];
        if (i < {lanes}) {{
          for (ushort d = {first}; d; d /= 2) v += simd_shuffle_down(v, d);
          if (i == 0) y[0] = v;
        }}""")


def test_a_sum_in_pairs_may_read_lanes_that_take_no_part():
    options = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    right = pairwise(4, 8)
    assert call(right, X, (1,), **options)[0] == 28
    assert right.statistics is not None
    assert right.statistics.undefined == (
        "simd_shuffle_down (body, line 3: `for (ushort d = 4; d; d /= 2) v += simd_shuffle_down(v, d);`) reads lane 8, "
        "which takes no part in it: the value is undefined"
    )
    assert np.isnan(call(pairwise(8, 8), X, (1,), **options)[0])
    assert call(pairwise(8, 16), X, (1,), grid=(16, 1, 1), threadgroup=(16, 1, 1))[0] == 120


def test_an_order_that_is_not_known_is_not_guessed():
    header = "METAL_FUNC float total(float v) { return simd_sum(v); }\n"
    kernel = simple(
        "float v = x[0];\nif (thread_index_in_simdgroup < 9) v = simd_max(v);\ny[0] = total(v);", header=header
    )
    with pytest.raises(
        ConvergenceError, match=r"(?s)cannot tell which is first\n.*simd_max \(body, line 2.*simd_sum \(header"
    ):
        call(kernel, X)


def test_a_simdgroup_may_be_cut_by_the_edge_of_the_grid():
    found = call(simple("y[thread_position_in_grid.x] = simd_sum(1.0f);"), X, (40,), grid=(40, 1, 1))
    assert found.tolist() == [32.0] * 32 + [8.0] * 8


def test_literals_are_floats_also_in_templates():
    header = """
        #define THIRD (1.0 / 3.0)
        template <typename T> T mean(T a, T b) { return static_cast<T>(0.1 * a + .5e0 * b + sizeof(0x1p-3)); }
        template <typename T> T third(T a) { return T(a * THIRD); }
    """
    source = (
        "y[0] = 0.1 + x[1]; y[1] = sizeof(0.1); y[2] = mean(x[3], x[4]); y[3] = third(x[7]); y[4] = mean<half>(3, 4);"
    )
    found = call(simple(source, header=header), X, (5,))
    f = np.float32
    want = [f(0.1) + f(1), 4, f(f(0.1) * f(3) + f(2)) + f(4), f(7) * (f(1) / f(3)), np.float16(f(0.1) * f(3) + f(6))]
    assert found.tolist() == want


# ---- buffers ----


@pytest.mark.parametrize(
    ("source", "guard", "says"),
    [
        ("y[0] = x[64];", "end", r"read input 'x' \(256 bytes\), at byte 256: just past its end"),
        ("y[0] = x[70];", "end", "24 bytes past its end"),
        ("y[0] = x[-1 - int(x[0])];", "start", "4 bytes before its start"),
        ("y[4] = 0.0f;", "end", "wrote to output 'y'.*just past its end"),
        ("y[-1 - int(x[0])] = 0.0f;", "start", "wrote to output 'y'.*4 bytes before its start"),
        ("y[4] = 0.0f;", "start", "wrote to output 'y'.*just past its end"),
        ("y[-1 - int(x[0])] = 0.0f;", "end", "wrote to output 'y'.*4 bytes before its start"),
        ("y[x_shape[1]] = 0.0f;", "end", "read input 'x_shape'"),
    ],
)
def test_both_ends_are_guarded(source: str, guard: str, says: str):
    with pytest.raises(MemoryFaultError, match=says):
        call(simple(source), X, guard=guard)


@pytest.mark.parametrize("build", BUILDS)
def test_buffers_are_guarded_in_every_build(build: str):
    with pytest.raises(MemoryFaultError, match=r"read input 'x'.*just past its end"):
        call(simple("y[0] = x[64];"), X, build=build)


def test_what_lies_past_an_input_does_not_pass_for_what_lies_past_an_output():
    """The damage is seen afterwards; in the build that then sees every access, the read comes before the write."""
    for source in ("y[i] = x[i];", "y[i] = 1.0f + x[i];"):
        with pytest.raises(
            MemoryFaultError, match=r"read input 'x' \(36 bytes\), at byte 36: just past its end, at body, line 1"
        ):
            call(simple("uint i = thread_position_in_grid.x; " + source), X[:9], (9,), grid=(10, 1, 1), guard="start")


def test_what_is_not_at_the_guard_has_canaries():
    kernel = simple("y[int(x[0])] = 1.0f;")
    past = {5: "just", 6: "4 bytes", 7: "8 bytes"}
    for written in past:
        with pytest.raises(MemoryFaultError, match=f"output 'y'.*{past[written]} past its end, at body"):
            call(kernel, mx.full((8,), float(written)), (5,), guard="start")
    read = call(simple("y[0] = as_type<float>(((const device uint*)x)[5]);"), mx.zeros(5), guard="start")
    assert np.isnan(read[0])


def large(n: int = RESIDENT // 4) -> mx.array:
    array = mx.random.uniform(shape=(n,))
    mx.eval(array)
    return array


LAST = "y[0] = x[x_shape[0] - 1];"


def test_large_inputs_are_copied_once():
    kernel, x = simple(LAST), large()
    before = pool.copies
    for _ in range(3):
        assert call(kernel, x)[0] == x[-1].item()
    assert pool.copies == before + 1
    assert pool.resident_bytes >= RESIDENT


def test_a_large_input_that_changes_is_copied_again():
    kernel, x = simple(LAST), large()
    call(kernel, x)
    np.asarray(x)[-1] = 7
    assert call(kernel, x)[0] == 7
    x[-1] = 8
    assert call(kernel, x)[0] == 8
    x += 1
    assert call(kernel, x)[0] == 9


def test_large_inputs_go_with_their_arrays():
    kernel, x = simple(LAST), large(3 * RESIDENT)
    call(kernel, X)
    gc.collect()
    call(kernel, X)
    before = pool.resident_bytes
    call(kernel, x)
    assert pool.resident_bytes > before
    del x
    gc.collect()
    call(kernel, X)
    assert pool.resident_bytes == before


def test_a_pool_keeps_what_was_used_last():
    small = Pool(total=2 * RESIDENT)
    arrays = [np.full(RESIDENT, i, np.uint8) for i in range(3)]
    for i in (0, 1, 0, 2, 0):
        with small.lending():
            small.readable(arrays[i].ctypes.data, RESIDENT, at_end=True)
    assert small.copies == 3
    assert small.resident_bytes == 2 * RESIDENT
    with small.lending():
        small.readable(arrays[1].ctypes.data, RESIDENT, at_end=True)
    assert small.copies == 4


def test_inputs_with_holes_are_guarded_where_they_end():
    kernel = simple("y[0] = x[6 * x_strides[0]]; y[1] = x[7 * x_strides[0]];", ensure_row_contiguous=False)
    x = mx.arange(32, dtype=mx.float32).reshape(8, 4)[:7, 0]
    with pytest.raises(MemoryFaultError, match=r"input 'x'.*past its end"):
        call(kernel, x)


def test_threadgroup_memory_is_new_for_every_threadgroup():
    source = """
        threadgroup float t;
        y[threadgroup_position_in_grid.x] = t;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t = 1.0f;
    """
    assert np.isnan(call(simple(source), X, (4,), grid=(4, 1, 1), threadgroup=(1, 1, 1))).all()


# ---- errors, and after them ----


def test_verbose_prints_the_text(capsys: pytest.CaptureFixture[str]):
    kernel = simple(COPY)
    call(kernel, X, (64,), verbose=True)
    assert kernel.text([X], [mx.float32]) in capsys.readouterr().out


def test_a_page_is_what_we_think():
    assert os.sysconf("SC_PAGE_SIZE") == PAGE


def test_a_product_of_a_models_size():
    """Weights that come again stay where the kernel reads them, and the result is that of the first call."""
    given = matvec.problem(3072, 1024)
    arrays = matvec.Problem(mx.array(given.wq), mx.array(given.ws), mx.array(given.x), given.exact, given.magnitude)
    kernel = matvec.kernel()
    first, second = matvec.run(kernel, arrays), matvec.run(kernel, arrays)
    assert matvec.errors(first, given).max() < 4
    assert np.array_equal(np.array(first), np.array(second))
