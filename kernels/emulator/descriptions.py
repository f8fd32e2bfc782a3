"""What happened, where, and what to do: the text of each kind of finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .errors import (
    ConvergenceError,
    EmulatorError,
    HangError,
    MemoryFaultError,
    RaceError,
    UndefinedBehaviorError,
)
from .memory import LARGE_GUARD
from .runtime import Failure

if TYPE_CHECKING:
    from .report import Failed


def _fault(failed: Failed) -> list[str]:
    report = failed.report
    did = ("wrote to" if report.is_write else "read") if report.is_known else "touched"
    if report.count:
        return [f"private memory is full, {failed.stopped}", failed.thread, "expected less than 100 KB per thread"]
    if not failed.regions or failed.nearest.distance(report.address) > LARGE_GUARD:
        where = f"address {report.address:#x}, which belongs to no buffer, {failed.stopped}"
        return [f"{did} {where}", failed.thread, "check the index and the strides"]
    region = failed.nearest
    if region.read_only and not region.distance(report.address):
        did, advice = "wrote to", "inputs are read-only; write to an output"
    else:
        advice = _INSIDE
    return [f"{did} {region.place(report.address)}, {failed.stopped}", failed.thread, advice]


_INSIDE = "expected an address inside; check the index, or guard it"


def _bounds(failed: Failed) -> list[str]:
    """Return the text of an access that the build "races" has found out of bounds, the first byte or a later one."""
    report, region = failed.report, failed.nearest
    where, end = region.place(report.address), region.start + region.bytes
    if not region.distance(report.address):
        where += f": the last {report.address + report.count - end} of {report.count} bytes are past its end"
    did = "wrote to" if report.is_write else "read"
    return [f"{did} {where}, at {failed.line_of(report.code - 1)}", failed.thread, _INSIDE]


def _not_written(failed: Failed) -> list[str]:
    """Return the text of a note on an output, of which an element counts as written if one of its bytes is."""
    region = failed.nearest
    missing, first = failed.report.count // region.item, (failed.report.address - region.start) // region.item
    name = region.name[region.name.index("'") :]
    return [
        f"{missing:,} of {region.bytes // region.item:,} elements of {name} were not written, the first is {first:,}",
        "check the grid and the guards, or give an init_value",
    ]


def _divergent(failed: Failed) -> list[str]:
    report = failed.report
    return [
        "lanes of one SIMD-group are at different operations",
        f"lane {report.lane}: {failed.site}",
        f"lane {report.other_lane}: {failed.other}",
        failed.thread,
        "all 32 lanes must come to the same one; move it out of what depends on the lane",
    ]


def _returned(failed: Failed) -> list[str]:
    return [
        f"{failed.site}, but {failed.report.count} lane(s) of the SIMD-group have returned",
        failed.thread,
        "let all lanes take part, and guard what surplus lanes load and store",
    ]


def _divergent_barrier(failed: Failed) -> list[str]:
    return [
        "threads of one threadgroup wait at different barriers",
        failed.site,
        failed.other,
        failed.thread,
        "all threads must come to the same one; move it out of what depends on the thread",
    ]


def _returned_barrier(failed: Failed) -> list[str]:
    return [
        f"{failed.site}, but {failed.report.count} thread(s) of the threadgroup have returned",
        failed.thread,
        "let all threads come to the barrier, and guard what surplus threads load and store",
    ]


def _inactive(failed: Failed) -> list[str]:
    return [
        failed.undefined,
        failed.thread,
        "let that lane take part, or do not read it",
    ]


def _uneven(failed: Failed) -> list[str]:
    return [
        f"{failed.site}: expected the same second argument in all lanes",
        f"lanes {failed.report.lane} and {failed.report.other_lane} have different ones, so the result is undefined",
        failed.thread,
        "pass the same value everywhere; only simd_shuffle takes a lane of each thread's own",
    ]


def _unordered(failed: Failed) -> list[str]:
    report = failed.report
    return [
        "lanes of one SIMD-group are at different operations, of which the emulator cannot tell the first",
        f"lane {report.lane}: {failed.site}",
        f"lane {report.other_lane}: {failed.other}",
        failed.thread,
        "this may be right on a GPU; to check it here, let all lanes take part in both, or write both into the body",
    ]


def _barrier_and_simd(failed: Failed) -> list[str]:
    report = failed.report
    return [
        "some lanes of a SIMD-group wait at a barrier, others at an operation",
        f"lane {report.lane}: {failed.site}",
        f"lane {report.other_lane}: {failed.other}",
        failed.thread,
        "all lanes must come to both",
    ]


_DIVISOR = "check the divisor"
# What to do about undefined behaviour, by the first word of its description in runtime/undefined.c.
_MENDS = {
    "signed": "use a wider or an unsigned type, or check the range first",
    "integer": _DIVISOR,
    "shift": "expected an amount from 0 on, below the bits of the type, and no negative value; check or mask it",
    "index": "make the array larger, or check the index",
    "cast": "clamp the value to the range of the type first",
    "misaligned": "check the offset, or use a packed type or single elements",
    "access": "check that the call gives this buffer",
}


def _undefined(failed: Failed) -> list[str]:
    report, site = failed.report, failed.report.site
    lines = [f"{failed.what}, at {failed.line((site.file or b'').decode(), site.line)}", failed.thread]
    if report.address and failed.regions:
        lines.append(f"{failed.nearest.place(report.address)}: expected an address that {report.count} divides")
    return [*lines, _MENDS[failed.what.split()[0]]]


def _arithmetic(failed: Failed) -> list[str]:
    return [f"integer division by zero, or overflow of it, {failed.stopped}", failed.thread, _DIVISOR]


def _impossible(failed: Failed) -> list[str]:
    return [
        f"came where only undefined behaviour leads, {failed.stopped}",
        failed.thread,
        'the build "undefined" may say more',
    ]


# What the two threads of a hazard did, in the order of the run. A read of memory without a value waits for a write.
_HAZARDS = {
    "read after write": ("wrote", "read"),
    "read after write, read first": ("read", "wrote"),
    "write after read": ("read", "wrote"),
    "write after write": ("wrote", "wrote"),
}


def _accesses(failed: Failed) -> list[str]:
    """Return the two accesses of a race, in their order."""
    report = failed.report
    before, now = _HAZARDS[failed.what]
    # A call is recorded by its return address, which is after the instruction.
    return [
        f"{failed.other_thread}, {before} it at {failed.line_of(report.other_code - 1)}",
        f"{failed.thread}, then {now} it at {failed.line_of(report.code - 1)}",
    ]


def _race(failed: Failed) -> list[str]:
    in_threadgroup = failed.nearest.name.startswith("threadgroup array")
    flag = "mem_threadgroup" if in_threadgroup else "mem_device"
    advice = f"put threadgroup_barrier(mem_flags::{flag}) between them, or let one thread do both"
    if failed.report.count:
        advice = "no barrier orders threadgroups: use an atomic, let one of them do both, or launch two kernels"
    where = failed.nearest.place(failed.report.address)
    hazard = failed.what.partition(",")[0]
    return [f"race: {hazard} of {where}; nothing orders the two threads", *_accesses(failed), advice]


def _same_value(failed: Failed) -> list[str]:
    where = failed.nearest.place(failed.report.address)
    return [f"two threads write the same value to {where}; let one of them do it", *_accesses(failed)]


def _truncated(failed: Failed) -> list[str]:
    site = failed.report.site
    return [
        f"an implicit conversion changes a number {failed.report.detail.decode()}, "
        f"at {failed.line((site.file or b'').decode(), site.line)}",
        failed.thread,
        "use a wider type, or write the conversion",
    ]


def _unwritten(failed: Failed) -> list[str]:
    where = failed.nearest.place(failed.report.address)
    return [
        f"read {where}, which nobody has written, at {failed.line_of(failed.report.code - 1)}",
        failed.thread,
        "write it first, or do not use what is read",
    ]


def _shifted(failed: Failed) -> list[str]:
    return [failed.undefined, failed.thread]


def _writer(failed: Failed) -> list[str]:
    nobody, thread, _ = range(3)
    if failed.report.count == nobody:
        return ["no thread wrote any of it: check the grid, the guards, and the index of the store"]
    wrote = f"{failed.thread} wrote"
    line = failed.line_of(failed.report.code - 1)
    if failed.report.count == thread:
        return [
            f"{wrote} it last, at {line}",
            "compare the values of this thread with the reference: log them with os_log_default.log and print_from",
        ]
    return [
        f"no thread wrote it; next to it, {wrote} {failed.nearest.place(failed.report.address)}, at {line}",
        "check the grid, the guards, and the index of the store",
    ]


def _spinning(failed: Failed) -> list[str]:
    after = f", after {failed.site}" if failed.what else ""
    return [
        f"a threadgroup does not end: one of its threads is {failed.stopped}{after}",
        failed.thread,
        "check the loop's condition; a thread must not wait for another one except at a barrier, because Metal does "
        "not promise that others run meanwhile; if the loop ends, raise time_limit",
    ]


def _threadgroup_bytes(failed: Failed) -> list[str]:
    where = failed.line("body", failed.report.site.line)
    return [f"threadgroup memory takes {failed.report.count:,} bytes with {where}", "expected at most 32,768"]


def _threadgroup_canary(failed: Failed) -> list[str]:
    group = ", ".join(map(str, failed.report.group))
    return [
        f"threadgroup array '{failed.what}' was written past its end, by a thread of threadgroup ({group})",
        "check the index, or guard it",
    ]


def _value_bytes(failed: Failed) -> list[str]:
    return [f"{failed.site} moves a value of {failed.report.count} bytes: expected at most 64"]


def _interrupted(failed: Failed) -> list[str]:
    return ["interrupted"]


class Kind(NamedTuple):
    """A kind of finding: its name, its exception and its text."""

    name: str
    error: type[EmulatorError]
    describe: Callable[[Failed], list[str]]
    is_return: bool = False  # whether the report's code is a return address


KINDS: dict[Failure, Kind] = {
    Failure.FAULT: Kind("fault", MemoryFaultError, _fault),
    Failure.DIVERGENT_SIMD: Kind("divergence", ConvergenceError, _divergent),
    Failure.RETURNED_SIMD: Kind("divergence", ConvergenceError, _returned),
    Failure.DIVERGENT_BARRIER: Kind("divergence", ConvergenceError, _divergent_barrier),
    Failure.RETURNED_BARRIER: Kind("divergence", ConvergenceError, _returned_barrier),
    Failure.BARRIER_AND_SIMD: Kind("divergence", ConvergenceError, _barrier_and_simd),
    Failure.INACTIVE_LANE: Kind("divergence", ConvergenceError, _inactive),
    Failure.UNEVEN_ARGUMENT: Kind("divergence", ConvergenceError, _uneven),
    Failure.UNORDERED_SIMD: Kind("divergence", ConvergenceError, _unordered),
    Failure.UNDEFINED: Kind("undefined", UndefinedBehaviorError, _undefined),
    Failure.ARITHMETIC: Kind("undefined", UndefinedBehaviorError, _arithmetic),
    Failure.IMPOSSIBLE: Kind("undefined", UndefinedBehaviorError, _impossible),
    Failure.THREADGROUP_BYTES: Kind("fault", MemoryFaultError, _threadgroup_bytes),
    Failure.THREADGROUP_CANARY: Kind("fault", MemoryFaultError, _threadgroup_canary),
    Failure.VALUE_BYTES: Kind("undefined", UndefinedBehaviorError, _value_bytes),
    Failure.RACE: Kind("race", RaceError, _race, is_return=True),
    Failure.INTERRUPTED: Kind("stopped", EmulatorError, _interrupted),
    Failure.SPINNING: Kind("hang", HangError, _spinning),
    Failure.BOUNDS: Kind("fault", MemoryFaultError, _bounds, is_return=True),
    Failure.SAME_VALUE: Kind("same value", RaceError, _same_value, is_return=True),
    Failure.TRUNCATED: Kind("truncation", UndefinedBehaviorError, _truncated),
    Failure.UNWRITTEN: Kind("unwritten", MemoryFaultError, _unwritten, is_return=True),
    Failure.SHIFTED: Kind("shifted", ConvergenceError, _shifted),
    Failure.NOT_WRITTEN: Kind("not written", MemoryFaultError, _not_written),
    Failure.WRITER: Kind("writer", EmulatorError, _writer, is_return=True),
}
