"""Load the emulator's C runtime and call it. runtime/abi.h documents the fields of the structures."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from .compiler import runtime_library
from .errors import Finding
from .memory import Bounds

MAX_THREADS = 1024
_ARRAYS = 64
_REPORTS = 32
_Three = ctypes.c_uint * 3


class Failure(IntEnum):
    """The kind of a `Report`. runtime/abi.h describes each kind. Kinds from SAME_VALUE on are notes, not mistakes."""

    FINE = 0
    FAULT = 1
    DIVERGENT_SIMD = 2
    RETURNED_SIMD = 3
    DIVERGENT_BARRIER = 4
    RETURNED_BARRIER = 5
    BARRIER_AND_SIMD = 6
    UNDEFINED = 7
    ARITHMETIC = 8
    IMPOSSIBLE = 9
    THREADGROUP_BYTES = 10
    THREADGROUP_CANARY = 11
    VALUE_BYTES = 12
    INTERRUPTED = 13
    RACE = 14
    INACTIVE_LANE = 15
    UNEVEN_ARGUMENT = 16
    UNORDERED_SIMD = 17
    SPINNING = 18
    BOUNDS = 19
    TENSOR = 20
    SAME_VALUE = 21
    TRUNCATED = 22
    UNWRITTEN = 23
    SHIFTED = 24
    WRITER = 25
    NOT_WRITTEN = 26

    @property
    def is_note(self) -> bool:
        """Whether the report is a note: a possible mistake, or the last writer of the byte at `Options.trace`."""
        return self >= Failure.SAME_VALUE


class Site(ctypes.Structure):
    """A place in the kernel's text, with the operation there."""

    _fields_ = (
        ("what", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint),
        ("column", ctypes.c_uint),
    )
    what: bytes | None
    file: bytes | None
    line: int
    column: int


class Report(ctypes.Structure):
    """A mistake or a note of the runtime about a dispatch: one run of a kernel over its grid."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("site", Site),
        ("other", Site),
        ("group", _Three),
        ("thread", _Three),
        ("lane", ctypes.c_uint),
        ("other_lane", ctypes.c_uint),
        ("other_group", _Three),
        ("other_thread", _Three),
        ("count", ctypes.c_uint),
        ("times", ctypes.c_uint),
        ("is_write", ctypes.c_uint),
        ("is_known", ctypes.c_uint),
        ("address", ctypes.c_ulong),
        ("code", ctypes.c_ulong),
        ("other_code", ctypes.c_ulong),
        ("object", ctypes.c_char_p),
        ("detail", ctypes.c_char * 320),
    )
    kind: int
    site: Site
    other: Site
    group: Any
    thread: Any
    lane: int
    other_lane: int
    other_group: Any
    other_thread: Any
    count: int
    times: int
    is_write: int
    is_known: int
    address: int
    code: int
    other_code: int
    object: bytes | None
    detail: bytes


class ThreadgroupArray(ctypes.Structure):
    """The name, address and size of an array in threadgroup memory."""

    _fields_ = (("name", ctypes.c_char_p), ("start", ctypes.c_ulong), ("bytes", ctypes.c_ulong))
    name: bytes
    start: int
    bytes: int


class Options(ctypes.Structure):
    """Options of a dispatch."""

    NAMES = ("seed", "all_lanes", "races", "at_end", "poison", "patience", "m5")
    _fields_ = (*((name, ctypes.c_uint) for name in NAMES), ("print_from", _Three), ("trace", ctypes.c_ulong))


class Statistics(ctypes.Structure):
    """Counts and notes of a dispatch.

    Attributes:
        simd_operations: SIMD-group operations, counted once per lane.
        barriers: barriers, counted once per thread.
        switches: switches between fibres; each fibre runs one thread of the grid.
        tensor_operations: operations on tensors, counted once per scope (a thread, SIMD-group or threadgroup).
        undefined: description of the first shift operation (such as `simd_shuffle_down`) that returned NaN because it
            read an inactive lane; None if no operation did this.
        notes: possible mistakes.
        writer: a note that names the last thread that wrote the byte at `Options.trace`; None if `trace` is 0.
    """

    NAMES = (
        "threads",
        "threadgroups",
        "simd_operations",
        "barriers",
        "switches",
        "threadgroup_bytes",
        "tensor_operations",
    )
    _fields_ = tuple((name, ctypes.c_ulong) for name in NAMES)
    threads: int
    threadgroups: int
    simd_operations: int
    barriers: int
    switches: int
    threadgroup_bytes: int
    tensor_operations: int
    undefined: str | None = None
    notes: tuple[Finding, ...] = ()
    writer: Finding | None = None

    def __repr__(self) -> str:
        return f"Statistics({', '.join(f'{name}={getattr(self, name):,}' for name in self.NAMES)})"


# The lock that a dispatch needs: fibres, threadgroup memory and signal handlers are global, so only one can run.
turn = threading.RLock()


@cache
def library() -> ctypes.CDLL:
    """Return the runtime; compile it if it is not cached."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    pointer = ctypes.c_void_p
    loaded.msl_dispatch.argtypes = [pointer] * 7
    loaded.msl_dispatch.restype = ctypes.c_uint
    loaded.msl_watch.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_uint]
    loaded.msl_watch.restype = None
    loaded.msl_bound.argtypes = [ctypes.c_ulong] * 4
    loaded.msl_bound.restype = None
    loaded.msl_printed.restype = ctypes.c_char_p
    loaded.msl_threadgroup_arrays.argtypes = [pointer]
    loaded.msl_threadgroup_arrays.restype = ctypes.c_uint
    return loaded


class Entry:
    """The entry point `msl_entry_INDEX` of a compiled kernel."""

    def __init__(self, file: Path, index: int) -> None:
        self._runtime = library()
        self._library = ctypes.CDLL(str(file))  # keeps it loaded
        self._address = ctypes.cast(getattr(self._library, f"msl_entry_{index}"), ctypes.c_void_p)

    def dispatch(
        self,
        buffers: Sequence[int],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        options: Options,
        watched: Sequence[tuple[int, int, bool]] = (),
        bounds: Sequence[Bounds] = (),
    ) -> tuple[Statistics, list[Report]]:
        """Run the kernel over the grid; return statistics and reports. The caller must hold `turn`.

        `buffers` has the values that the entry point receives, most of them addresses of buffers. `watched` and
        `bounds` are for kernels compiled in the build "races". `watched` has the memory to check for races, as
        (address, bytes, whether it has no value yet). `bounds` has the pages and the bytes of each buffer, to report
        accesses to the pages outside of the bytes.
        """
        for start, size, blank in watched:
            self._runtime.msl_watch(start, size, blank)
        for one in bounds:
            self._runtime.msl_bound(*one)
        statistics, reports = Statistics(), (Report * _REPORTS)()
        n = self._runtime.msl_dispatch(
            self._address,
            (ctypes.c_void_p * len(buffers))(*buffers),
            _Three(*grid),
            _Three(*threadgroup),
            ctypes.byref(options),
            ctypes.byref(statistics),
            reports,
        )
        return statistics, list(reports)[:n]


def printed() -> str:
    """Return the lines that the kernel printed in the last dispatch."""
    return bytes(library().msl_printed()).decode(errors="replace")


def threadgroup_arrays() -> list[ThreadgroupArray]:
    """Return the threadgroup arrays of the last dispatch."""
    arrays = (ThreadgroupArray * _ARRAYS)()
    return list(arrays)[: library().msl_threadgroup_arrays(arrays)]
