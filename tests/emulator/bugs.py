"""Mistakes that people make in kernels, and what the emulator says to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.emulator import (
    ConvergenceError,
    EmulatorError,
    MemoryFaultError,
    RaceError,
    UndefinedBehaviorError,
)

# In which builds a kernel is run until something is found, and in which orders.
BUILDS = ("spaces", "undefined", "races")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Bug:
    """A replacement in a kernel that is right, and how it comes out.

    Attributes:
        name: what is wrong.
        old: what the kernel says.
        new: what it says with the bug.
        caught: the error; None if the kernel ends, but with values that are wrong, or differ with the order.
        says: words of the error, as a regular expression.
        build: the build that finds it; all others may.
        header: whether it is in the header.
        note: words of a note, for what may be meant.
        switches: options of the call that the bug needs; a kernel that also runs on CUDA is checked with all of them.
    """

    name: str
    old: str
    new: str
    caught: type[EmulatorError] | None
    says: str = ""
    build: str = "spaces"
    header: bool = False
    note: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict)


ALL_LANES = {"lanes": "all"}
SUFFIXES = {"suffixes": True}

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_FIRST_BARRIER = _BARRIER + "\n    if (group == 0"
_LAST_BARRIER = _BARRIER + "  // before partial is used again"
_SUM = "sums[r] = simd_sum(sums[r]);"
_SHUFFLED = "for (ushort d = 16; d; d /= 2) sums[r] += simd_shuffle_xor(sums[r], d);"
_SETUP = "  const int first ="
_CODES = "*(const device uint2*)(wq"

BUGS = [
    # ---- bounds ----
    Bug(
        "rows not clamped",
        "min(first + r, N - 1)",
        "first + r",
        MemoryFaultError,
        r"read input 'wq' \(1,440 bytes\), at byte 1,440: just past its end, near body, line 14: `const uint2 codes",
    ),
    Bug("store not guarded", "if (first + r < N) y", "y", MemoryFaultError, "output 'y'.*past its end"),
    Bug("loop goes past the row", "k < K; k += 512", "k < K + 8; k += 512", MemoryFaultError, "past its end"),
    Bug(
        "read before the start",
        "x + v * K + k)",
        "x + v * K + k - 8)",
        MemoryFaultError,
        "input 'x' .* 32 bytes before its start",
    ),
    Bug(
        "write before the start",
        "y[v * N + first + r] =",
        "y[v * N + first + r - 1] =",
        MemoryFaultError,
        "output 'y' .*before its start",
    ),
    Bug(
        "write to an input",
        _SETUP,
        "  ((device half*)ws)[0] = half(0.0f);\n" + _SETUP,
        MemoryFaultError,
        "wrote to input 'ws' .*inputs are read-only",
    ),
    Bug("index far away", "partial[r] + ", "partial[r] + y[50000000] + ", MemoryFaultError, "read"),
    Bug(
        "past the end of threadgroup memory",
        "partial[group * ROWS + r] =",
        "partial[2 * group * ROWS + r] =",
        MemoryFaultError,
        "threadgroup array 'partial'",
    ),
    Bug(
        "too much threadgroup memory",
        "partial[2 * ROWS]",
        "partial[2 * ROWS + 9000]",
        MemoryFaultError,
        "expected at most 32,768",
    ),
    Bug(
        "index beyond a private array",
        "float sums[ROWS];",
        "float sums[ROWS - 1];",
        UndefinedBehaviorError,
        "beyond an array's bounds",
        "undefined",
    ),
    # ---- barriers and races ----
    Bug(
        "no barrier before others' results are read",
        _FIRST_BARRIER,
        "\n    if (group == 0",
        RaceError,
        r"read after write of threadgroup array 'partial'.*thread \(0, 0, 0\), lane 0, read it at body, line 25: .*"
        r"thread \(32, 0, 0\), lane 0, then wrote it at body, line 21: .*threadgroup_barrier\(mem_flags::mem_thr",
        "races",
    ),
    Bug("no barrier, seen in the values", _FIRST_BARRIER, "\n    if (group == 0", None),
    Bug(
        "no barrier before memory is used again",
        _LAST_BARRIER,
        "",
        RaceError,
        "write after read of threadgroup array 'partial'",
        "races",
    ),
    Bug(
        "a barrier that orders no memory",
        _FIRST_BARRIER,
        _FIRST_BARRIER.replace("mem_threadgroup", "mem_none"),
        RaceError,
        "read after write of threadgroup array 'partial'",
        "races",
        note="body, line 22: this barrier orders no memory",
    ),
    Bug(
        "a barrier that orders other memory",
        _FIRST_BARRIER,
        _FIRST_BARRIER.replace("mem_threadgroup", "mem_device"),
        RaceError,
        "read after write of threadgroup array 'partial'",
        "races",
    ),
    Bug(
        "a SIMD operation for a barrier",
        "if (lane == 0)\n      for (int r",
        "partial[group * ROWS + lane % ROWS] = 0.0f; if (lane == 0)\n      for (int r",
        RaceError,
        "write after write of threadgroup array 'partial'",
        "races",
    ),
    Bug("no second barrier, seen in the values", _LAST_BARRIER, "", None),
    Bug(
        "a SIMD-group's barrier for a threadgroup's",
        _FIRST_BARRIER,
        _FIRST_BARRIER.replace("threadgroup_barrier", "simdgroup_barrier"),
        RaceError,
        "threadgroup array 'partial'",
        "races",
    ),
    Bug(
        "every thread stores",
        "if (group == 0 && lane == 0)",
        "if (group == 0)",
        None,
        build="races",
        note="two threads write the same value to output 'y'.*wrote it.*then wrote it",
    ),
    Bug(
        "threadgroups share an output",
        "y[v * N + first + r] =",
        "y[v * N + r] =",
        RaceError,
        r"write after write of output 'y'.*threadgroup \(0, 0, 0\).*threadgroup \(1, 0, 0\).*no barrier orders",
        "races",
    ),
    Bug(
        "adds without an atomic",
        "y[v * N + first + r] = partial[r]",
        "y[0] += partial[r]",
        RaceError,
        "output 'y'",
        "races",
    ),
    # ---- who comes to a barrier or an operation ----
    Bug("operation under a condition on the lane", _SUM, f"if (lane < 31) {_SUM}", None),
    Bug(
        "operation under a condition, and all lanes are wanted",
        _SUM,
        f"if (lane < 31) {_SUM}",
        ConvergenceError,
        "lane",
        switches=ALL_LANES,
    ),
    Bug(
        "surplus lanes return early",
        _SETUP,
        "  if (lane >= 28) return;\n" + _SETUP,
        ConvergenceError,
        r"8 thread\(s\) of the threadgroup have returned",
    ),
    Bug(
        "surplus lanes return early, and all lanes are wanted",
        _SETUP,
        "  if (lane >= 28) return;\n" + _SETUP,
        ConvergenceError,
        "lane.*have returned",
        switches=ALL_LANES,
    ),
    Bug(
        "shuffle from a lane that takes no part",
        _SUM,
        "if (lane < 31)\n        " + _SHUFFLED,
        ConvergenceError,
        r"simd_shuffle_xor \(body, line \d+.*reads lane 31, which takes no part",
    ),
    Bug(
        "shuffle by different distances",
        _SUM,
        "sums[r] += simd_shuffle_down(sums[r], ushort(1 + lane / 16));",
        ConvergenceError,
        "expected the same second argument in all lanes\n  lanes 0 and 16",
    ),
    Bug(
        "broadcast of a lane of each thread's own",
        _SUM,
        "sums[r] = simd_broadcast(sums[r], ushort(lane ^ 1));",
        ConvergenceError,
        "same second argument",
    ),
    Bug(
        "shuffle from a lane that does not exist",
        _SUM,
        "sums[r] = simd_shuffle(sums[r], ushort(lane + 1));",
        ConvergenceError,
        "reads lane 32",
    ),
    Bug(
        "barrier of a SIMD-group under a condition",
        _SUM,
        f"{{ if (lane < 31) simdgroup_barrier(mem_flags::mem_none); {_SUM} }}",
        ConvergenceError,
        "lanes of one SIMD-group are at different operations",
    ),
    Bug(
        "a SIMD-group returns before a barrier",
        _SETUP,
        "  if (group == 1) return;\n" + _SETUP,
        ConvergenceError,
        r"32 thread\(s\) of the threadgroup have returned",
    ),
    Bug(
        "barrier under a condition",
        _FIRST_BARRIER,
        "if (group == 0) " + _FIRST_BARRIER,
        ConvergenceError,
        "different barriers",
    ),
    Bug(
        "two barriers for one",
        _FIRST_BARRIER,
        f"if (group == 0) {_BARRIER} else\n {_FIRST_BARRIER}",
        ConvergenceError,
        "different barriers",
    ),
    Bug(
        "some lanes at a barrier, others at an operation",
        _SUM,
        f"if (lane == 3) {_BARRIER} else {_SUM}",
        ConvergenceError,
        "some lanes of a SIMD-group wait at a barrier",
        switches=ALL_LANES,
    ),
]
