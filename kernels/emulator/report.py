"""Error messages for faults: kernel, line, threadgroup, thread, buffer, byte, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernels.emulator.errors import (
    ConvergenceError,
    EmulatorError,
    HangError,
    MemoryFaultError,
    RaceError,
    UndefinedBehaviorError,
)
from kernels.emulator.findings import Finding, Place
from kernels.emulator.lines import line_at
from kernels.emulator.memory import GUARD
from kernels.emulator.runtime import Failure, Report, Site


class Region(NamedTuple):
    """Memory of a kernel: an input, an output, or an array in threadgroup memory."""

    name: str  # input 'x'
    start: int
    bytes: int
    read_only: bool = False

    def distance(self, address: int) -> int:
        """Return 0 for an address inside, else the distance in bytes to the nearer end."""
        return max(self.start - address, address - (self.start + self.bytes - 1), 0)

    def place(self, address: int) -> str:
        """Return a description of an address."""
        offset = address - self.start
        name = f"{self.name} ({self.bytes:,} bytes)"
        if offset < 0:
            return f"{name}, {-offset:,} bytes before its start"
        if offset >= self.bytes:
            past = f"{offset - self.bytes:,} bytes past" if offset > self.bytes else "just past"
            return f"{name}, at byte {offset:,}: {past} its end"
        return f"{name}, at byte {offset:,}"


@dataclass(frozen=True)
class Failed:
    """A report of a dispatch."""

    texts: Mapping[str, str]  # header and body
    report: Report
    regions: Sequence[Region]

    @property
    def kind(self) -> Failure:
        """What happened."""
        return Failure(self.report.kind)

    @property
    def error_class(self) -> type[EmulatorError]:
        """The class of the exception."""
        return _KINDS[self.kind].error

    @property
    def finding(self) -> Finding:
        """The report as text and values."""
        report, kind = self.report, _KINDS[self.kind]
        place = self._place(report.group, report.thread, report.code - kind.is_return, report.site)
        other = None
        if report.other_code:
            other = self._place(report.other_group, report.other_thread, report.other_code - 1, report.other)
        return Finding(kind.name, self.kind.is_note, "\n".join(kind.describe(self)), place, other, report.times)

    def _place(self, group: Sequence[int], thread: Sequence[int], code: int, site: Site) -> Place:
        found = self._found(code) if code > 0 else None
        file, line = found or ((site.file or b"body").decode(), site.line)
        return Place(_three(group), _three(thread), file if line and file in self.texts else None, line)

    def _found(self, code: int) -> tuple[str, int] | None:
        """Return the file and the line of an instruction, if it is one of the kernel's text."""
        found = line_at(Path(self.report.object.decode()), code) if self.report.object else None
        return (found.file, found.number) if found and found.file in self.texts else None

    @property
    def thread(self) -> str:
        """The thread that failed."""
        return _thread(self.report.group, self.report.thread, self.report.lane)

    @property
    def other_thread(self) -> str:
        """The thread whose access came before."""
        return _thread(self.report.other_group, self.report.other_thread, self.report.other_lane)

    @property
    def site(self) -> str:
        """The place of the thread, if it was recorded."""
        return self.at(self.report.site)

    @property
    def undefined(self) -> str:
        """The read of a lane that takes no part in the operation."""
        return f"{self.site} reads lane {self.report.other_lane}, which takes no part in it: the value is undefined"

    @property
    def other(self) -> str:
        """The place of the other thread."""
        return self.at(self.report.other)

    @property
    def what(self) -> str:
        """The operation, variable or mistake in the report."""
        return (self.report.site.what or b"").decode()

    @property
    def nearest(self) -> Region:
        """The region that contains the address, or is nearest to it."""
        return min(self.regions, key=lambda region: region.distance(self.report.address))

    def at(self, site: Site) -> str:
        """Return an operation with its line."""
        return f"{(site.what or b'').decode()} ({self.line((site.file or b'body').decode(), site.line)})"

    def line(self, file: str, number: int) -> str:
        """Return the number and the text of a line of the kernel."""
        lines = self.texts.get(file, "").splitlines()
        text = f": `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else ""
        return f"{file}, line {number}{text}"

    def line_of(self, code: int) -> str:
        """Return the line of an instruction."""
        found = self._found(code)
        return self.line(*found) if found else "a line that is not known"

    @property
    def stopped(self) -> str:
        """The line of the instruction that faulted; the compiler moves some by a line or two."""
        return f"near {self.line_of(self.report.code)}"


def _three(of: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = of
    return x, y, z


def _thread(group: Sequence[int], thread: Sequence[int], lane: int) -> str:
    return f"threadgroup {_three(group)}, thread {_three(thread)}, lane {lane}"


def _fault(failed: Failed) -> list[str]:
    report = failed.report
    did = ("wrote to" if report.is_write else "read") if report.is_known else "touched"
    if report.count:
        return [f"private memory is full, {failed.stopped}", failed.thread, "expected less than 100 KB per thread"]
    if not failed.regions or failed.nearest.distance(report.address) > GUARD:
        where = f"address {report.address:#x}, which belongs to no buffer, {failed.stopped}"
        return [f"{did} {where}", failed.thread, "check the index and the strides"]
    region = failed.nearest
    if region.read_only and not region.distance(report.address):
        did, advice = "wrote to", "inputs are read-only; write to an output"
    else:
        advice = "expected an address inside; check the index, or guard it"
    return [f"{did} {region.place(report.address)}, {failed.stopped}", failed.thread, advice]


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


def _undefined(failed: Failed) -> list[str]:
    report, site = failed.report, failed.report.site
    lines = [f"{failed.what}, at {failed.line((site.file or b'').decode(), site.line)}", failed.thread]
    if report.address and failed.regions:
        lines.append(f"{failed.nearest.place(report.address)}: expected an address that {report.count} divides")
    return lines


def _arithmetic(failed: Failed) -> list[str]:
    return [f"integer division by zero, or overflow of it, {failed.stopped}", failed.thread]


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
    return [f"read {where}, which nobody has written, at {failed.line_of(failed.report.code - 1)}", failed.thread]


def _shifted(failed: Failed) -> list[str]:
    return [failed.undefined, failed.thread]


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


class _Kind(NamedTuple):
    name: str
    error: type[EmulatorError]
    describe: Callable[[Failed], list[str]]
    is_return: bool = False  # whether the report's code is a return address


_KINDS: dict[Failure, _Kind] = {
    Failure.FAULT: _Kind("fault", MemoryFaultError, _fault),
    Failure.DIVERGENT_SIMD: _Kind("divergence", ConvergenceError, _divergent),
    Failure.RETURNED_SIMD: _Kind("divergence", ConvergenceError, _returned),
    Failure.DIVERGENT_BARRIER: _Kind("divergence", ConvergenceError, _divergent_barrier),
    Failure.RETURNED_BARRIER: _Kind("divergence", ConvergenceError, _returned_barrier),
    Failure.BARRIER_AND_SIMD: _Kind("divergence", ConvergenceError, _barrier_and_simd),
    Failure.INACTIVE_LANE: _Kind("divergence", ConvergenceError, _inactive),
    Failure.UNEVEN_ARGUMENT: _Kind("divergence", ConvergenceError, _uneven),
    Failure.UNORDERED_SIMD: _Kind("divergence", ConvergenceError, _unordered),
    Failure.UNDEFINED: _Kind("undefined", UndefinedBehaviorError, _undefined),
    Failure.ARITHMETIC: _Kind("undefined", UndefinedBehaviorError, _arithmetic),
    Failure.IMPOSSIBLE: _Kind("undefined", UndefinedBehaviorError, _impossible),
    Failure.THREADGROUP_BYTES: _Kind("fault", MemoryFaultError, _threadgroup_bytes),
    Failure.THREADGROUP_CANARY: _Kind("fault", MemoryFaultError, _threadgroup_canary),
    Failure.VALUE_BYTES: _Kind("undefined", UndefinedBehaviorError, _value_bytes),
    Failure.RACE: _Kind("race", RaceError, _race, is_return=True),
    Failure.INTERRUPTED: _Kind("stopped", EmulatorError, _interrupted),
    Failure.SPINNING: _Kind("hang", HangError, _spinning),
    Failure.SAME_VALUE: _Kind("same value", RaceError, _same_value, is_return=True),
    Failure.TRUNCATED: _Kind("truncation", UndefinedBehaviorError, _truncated),
    Failure.UNWRITTEN: _Kind("unwritten", MemoryFaultError, _unwritten, is_return=True),
    Failure.SHIFTED: _Kind("shifted", ConvergenceError, _shifted),
}
