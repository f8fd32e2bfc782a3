"""Turn reports of the emulator's runtime into text: mistake, line, threadgroup, thread, buffer, byte, and advice."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .errors import (
    ConvergenceError,
    EmulatorError,
    Finding,
    HangError,
    MemoryFaultError,
    Place,
    RaceError,
    TensorError,
    UndefinedBehaviorError,
)
from .memory import LARGE_GUARD, Buffer
from .runtime import Failure, Report, Site

# ---- find the source line of an instruction, in the line table (DWARF 4) of an ELF file ----
#
# Only the part of the format that clang writes is supported. Source: DWARF Debugging Information Format, version 4,
# section 6.2, https://dwarfstd.org/doc/DWARF4.pdf


class Line(NamedTuple):
    """A place in a source file."""

    file: str
    number: int


class _Row(NamedTuple):
    address: int
    file: int
    line: int
    ends: bool  # whether the row only marks the end of a sequence of rows, without an instruction


@lru_cache(4096)
def line_at(library: Path, offset: int) -> Line | None:
    """Return the line of the instruction at `offset` from the library's base address; None if the line is unknown."""
    try:
        data = _section(library.read_bytes(), b".debug_line")
    except (OSError, struct.error, IndexError):
        return None
    position = 0
    while data is not None and position + 4 <= len(data):
        length = int(struct.unpack_from("<I", data, position)[0])
        found = _search(_Reader(data[: position + 4 + length], position + 4), offset)
        if found:
            return found
        position += 4 + length
    return None


def _section(elf: bytes, name: bytes) -> bytes | None:
    """Return the content of a section of a 64-bit little-endian ELF file; None if there is no such section."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return None
    table, size, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    sections = [struct.unpack_from("<II8x8xQQ", elf, table + i * size) for i in range(count)]
    strings = sections[names][2]
    for label, _, start, length in sections:
        if elf[strings + label : strings + label + len(name) + 1] == name + b"\0":
            return elf[start : start + length]
    return None


class _Reader:
    """A sequential reader of bytes."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position

    @property
    def more(self) -> bool:
        return self.position < len(self.data)

    def number(self, size: int, *, signed: bool = False) -> int:
        """Read an integer of `size` bytes."""
        self.position += size
        return int.from_bytes(self.data[self.position - size : self.position], "little", signed=signed)

    def leb(self, *, signed: bool = False) -> int:
        """Read a LEB128 integer: seven bits per byte."""
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    def text(self) -> str:
        """Read text up to a zero byte."""
        end = self.data.index(0, self.position)
        self.position, start = end + 1, self.position
        return self.data[start:end].decode(errors="replace")


class _Header(NamedTuple):
    step: int  # bytes of the smallest instruction
    line_base: int
    line_range: int
    lengths: tuple[int, ...]  # the number of operands of each standard opcode
    files: tuple[str, ...]


def _search(reader: _Reader, offset: int) -> Line | None:
    if reader.number(2) != 4:
        return None
    header = _header(reader)
    before: _Row | None = None
    known = 0  # the last line other than 0; line 0 marks code that belongs to no line
    for row in _rows(reader, header):
        if before and not before.ends and before.address <= offset < row.address:
            number = before.line or known
            return Line(header.files[before.file - 1], number) if number else None
        known = row.line or known
        before = row
    return None


def _header(reader: _Reader) -> _Header:
    end = reader.number(4) + reader.position
    step = reader.number(1)
    reader.number(2)  # operations per instruction, and whether rows begin as statements
    line_base, line_range = reader.number(1, signed=True), reader.number(1)
    lengths = tuple(reader.number(1) for _ in range(reader.number(1) - 1))
    while reader.text():  # folders
        pass
    files = []
    while name := reader.text():
        files.append(name)
        for _ in range(3):  # folder, time, size
            reader.leb()
    reader.position = end
    return _Header(step, line_base, line_range, lengths, tuple(files))


def _rows(reader: _Reader, header: _Header) -> Iterator[_Row]:
    """Run the line-number program, the compressed form of the table, and yield the rows of the table."""
    address, file, line = 0, 1, 1
    while reader.more:
        code = reader.number(1)
        if code > len(header.lengths):  # a special opcode: advance address and line, and add a row
            change = code - len(header.lengths) - 1
            address += change // header.line_range * header.step
            line += header.line_base + change % header.line_range
            yield _Row(address, file, line, False)
        elif code == 0:  # an extended opcode
            size = reader.leb()
            end = reader.position + size
            match reader.number(1):
                case 1:
                    yield _Row(address, file, line, True)
                    address, file, line = 0, 1, 1
                case 2:
                    address = reader.number(size - 1)
            reader.position = end
        elif code == 1:
            yield _Row(address, file, line, False)
        elif code == 2:
            address += reader.leb() * header.step
        elif code == 3:
            line += reader.leb(signed=True)
        elif code == 4:
            file = reader.leb()
        elif code == 8:
            address += (255 - len(header.lengths) - 1) // header.line_range * header.step
        elif code == 9:
            address += reader.number(2)
        else:
            for _ in range(header.lengths[code - 1]):
                reader.leb()


# ---- the text of each kind of finding ----


def _fault(failed: Failed) -> list[str]:
    report = failed.report
    did = ("wrote to" if report.is_write else "read") if report.is_known else "touched"
    if report.count:
        return [f"private memory is full, {failed.stopped}", failed.thread, "expected less than 100 KB per thread"]
    if not failed.regions or distance(failed.nearest, report.address) > LARGE_GUARD:
        where = f"address {report.address:#x}, which belongs to no buffer, {failed.stopped}"
        return [f"{did} {where}", failed.thread, "check the index and the strides"]
    region = failed.nearest
    if region.read_only and not distance(region, report.address):
        did, advice = "wrote to", "inputs are read-only; write to an output"
    else:
        advice = _INSIDE
    return [f"{did} {region.place(report.address)}, {failed.stopped}", failed.thread, advice]


_INSIDE = "expected an address inside; check the index, or guard it"


def _bounds(failed: Failed) -> list[str]:
    """Return the text of an access, completely or partly out of bounds, that the build "races" found."""
    report, region = failed.report, failed.nearest
    where, end = region.place(report.address), region.start + region.bytes
    if not distance(region, report.address):
        where += f": the last {report.address + report.count - end} of {report.count} bytes are past its end"
    did = "wrote to" if report.is_write else "read"
    return [f"{did} {where}, at {failed.line_of(report.code - 1)}", failed.thread, _INSIDE]


def _tensor(failed: Failed) -> list[str]:
    """Return the text of a wrong use of a tensor. `Report.detail` has the mistake and, on a second line, advice."""
    report, site = failed.report, failed.report.site
    what, _, advice = report.detail.decode(errors="replace").partition("\n")
    where = failed.line(site.file.decode(), site.line) if site.file else failed.line_of(report.code - 1)
    return [f"{what}, at {where}", failed.thread, advice]


def _not_written(failed: Failed) -> list[str]:
    """Return the text of a note about the elements of an output that no thread has written."""
    region = failed.nearest
    missing, first = failed.report.count // region.item, (failed.report.address - region.start) // region.item
    name = region.name[region.name.index("'") :]
    return [
        f"{missing:,} of {region.bytes // region.item:,} elements of {name} were not written, the first is {first:,}",
        "check the grid and the guards, or give an init_value",
    ]


def _lanes_apart(what: str, advice: str) -> Callable[[Failed], list[str]]:
    """Return a function for `Kind.describe`: `what` happened, then two lanes and their operations, then `advice`."""

    def describe(failed: Failed) -> list[str]:
        lanes = (failed.report.lane, failed.site), (failed.report.other_lane, failed.other)
        return [what, *(f"lane {lane}: {site}" for lane, site in lanes), failed.thread, advice]

    return describe


def _returned(who: str, advice: str) -> Callable[[Failed], list[str]]:
    """Return a function for `Kind.describe`: an operation needs lanes or threads (`who`) that have returned."""
    return lambda failed: [f"{failed.site}, but {failed.report.count} {who} have returned", failed.thread, advice]


def _divergent_barrier(failed: Failed) -> list[str]:
    return [
        "threads of one threadgroup wait at different barriers",
        failed.site,
        failed.other,
        failed.thread,
        "all threads must reach the same barrier; move it out of code that depends on the thread",
    ]


def _inactive(failed: Failed) -> list[str]:
    return [failed.undefined, failed.thread, "let that lane take part, or do not read it"]


def _uneven(failed: Failed) -> list[str]:
    return [
        f"{failed.site}: expected the same second argument in all lanes",
        f"lanes {failed.report.lane} and {failed.report.other_lane} have different ones, so the result is undefined",
        failed.thread,
        "pass the same value in all lanes; only simd_shuffle takes a different lane per thread",
    ]


_DIVISOR = "check the divisor"
# Maps the first word of a description of undefined behaviour (in runtime/undefined.c) to advice.
_ADVICE = {
    "signed": "use a wider or an unsigned type, or check the range first",
    "integer": _DIVISOR,
    "shift": "expected a value from 0 on, and an amount from 0 to the type's bits - 1; check or mask the amount",
    "index": "make the array larger, or check the index",
    "cast": "clamp the value to the range of the type first",
    "misaligned": "check the offset, or use a packed type or single elements",
    "access": "check that the call passes this buffer",
}


def _undefined(failed: Failed) -> list[str]:
    report, site = failed.report, failed.report.site
    lines = [f"{failed.what}, at {failed.line((site.file or b'').decode(), site.line)}", failed.thread]
    if report.address and failed.regions:
        lines.append(f"{failed.nearest.place(report.address)}: expected an address divisible by {report.count}")
    return [*lines, _ADVICE[failed.what.split()[0]]]


def _arithmetic(failed: Failed) -> list[str]:
    return [f"integer division by zero, or of the lowest integer by -1, {failed.stopped}", failed.thread, _DIVISOR]


def _impossible(failed: Failed) -> list[str]:
    return [
        f"reached code that only undefined behaviour reaches, {failed.stopped}",
        failed.thread,
        'check the kernel in the build "undefined"',
    ]


# Maps each hazard to what the first and the second thread of the race did in this run. In the hazard with "read first",
# the value should be written before it is read, but in this run the read was first.
_HAZARDS = {
    "read after write": ("wrote", "read"),
    "read after write, read first": ("read", "wrote"),
    "write after read": ("read", "wrote"),
    "write after write": ("wrote", "wrote"),
}


def _accesses(failed: Failed) -> list[str]:
    """Return a line for each of the two accesses of a race, in the order of this run."""
    report = failed.report
    before, now = _HAZARDS[failed.what]
    # In the build "races", each access calls the runtime. `code` is the return address of this call, so `code - 1` is
    # in the call.
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
        f"read {where}, which no thread has written, at {failed.line_of(failed.report.code - 1)}",
        failed.thread,
        "write it first, or do not use the value",
    ]


def _shifted(failed: Failed) -> list[str]:
    return [failed.undefined, failed.thread]


def _writer(failed: Failed) -> list[str]:
    no_thread, thread, _neighbor = range(3)  # the values of `Report.count`, in the order of races.c
    if failed.report.count == no_thread:
        return ["no thread wrote this element or one near it: check the grid, the guards, and the index of the store"]
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
        "check the loop's condition; a thread may wait for other threads only at a barrier, because Metal does not "
        "promise that they run meanwhile; if the loop does end, raise time_limit",
    ]


def _threadgroup_bytes(failed: Failed) -> list[str]:
    where = failed.line("body", failed.report.site.line)
    return [f"threadgroup memory takes {failed.report.count:,} bytes, including {where}", "expected at most 32,768"]


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
    """A kind of finding: its name, the class of its exception, and a function that returns the lines of its text."""

    name: str
    error: type[EmulatorError]
    describe: Callable[[Failed], list[str]]
    is_return: bool = False  # whether the report's `code` is a return address, which is after the instruction


_divergent = _lanes_apart(
    "lanes of one SIMD-group are at different operations",
    "all 32 lanes must reach the same operation; move it out of code that depends on the lane",
)
_unordered = _lanes_apart(
    "lanes of one SIMD-group are at different operations, and the emulator cannot tell which is first",
    "this may be right on a GPU; to check it here, let all lanes take part in both operations, or write both "
    "operations into the body",
)
_barrier_and_simd = _lanes_apart(
    "some lanes of a SIMD-group wait at a barrier, others at an operation", "all lanes must reach both"
)
_returned_simd = _returned(
    "lane(s) of the SIMD-group", "let all lanes take part, and guard the loads and stores of surplus lanes"
)
_returned_barrier = _returned(
    "thread(s) of the threadgroup",
    "let all threads reach the barrier, and guard the loads and stores of surplus threads",
)

KINDS: dict[Failure, Kind] = {
    Failure.FAULT: Kind("fault", MemoryFaultError, _fault),
    Failure.DIVERGENT_SIMD: Kind("divergence", ConvergenceError, _divergent),
    Failure.RETURNED_SIMD: Kind("divergence", ConvergenceError, _returned_simd),
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
    Failure.TENSOR: Kind("tensor", TensorError, _tensor, is_return=True),
    Failure.SAME_VALUE: Kind("same value", RaceError, _same_value, is_return=True),
    Failure.TRUNCATED: Kind("truncation", UndefinedBehaviorError, _truncated),
    Failure.UNWRITTEN: Kind("unwritten", MemoryFaultError, _unwritten, is_return=True),
    Failure.SHIFTED: Kind("shifted", ConvergenceError, _shifted),
    Failure.NOT_WRITTEN: Kind("not written", MemoryFaultError, _not_written),
    Failure.WRITER: Kind("writer", EmulatorError, _writer, is_return=True),
}


class Region(NamedTuple):
    """Memory of a kernel: an input, an output, or an array in threadgroup memory."""

    name: str  # for example "input 'x'"
    start: int
    bytes: int
    read_only: bool = False
    item: int = 1  # bytes of an element

    def place(self, address: int) -> str:
        """Return a description of an address relative to this region."""
        offset = address - self.start
        name = f"{self.name} ({self.bytes:,} bytes)"
        if offset < 0:
            return f"{name}, {-offset:,} bytes before its start"
        if offset >= self.bytes:
            past = f"{offset - self.bytes:,} bytes past" if offset > self.bytes else "just past"
            return f"{name}, at byte {offset:,}: {past} its end"
        return f"{name}, at byte {offset:,}"


def distance(of: Region | Buffer, address: int) -> int:
    """Return the distance in bytes between an address and the memory `of`; 0 for an address inside."""
    return max(of.start - address, address - (of.start + of.bytes - 1), 0)


@dataclass(frozen=True)
class Failed:
    """A report of the runtime, with the kernel's text and memory."""

    texts: Mapping[str, str]  # maps "header" and "body", or the name of each .metal file, to the source text
    report: Report
    regions: Sequence[Region]

    @property
    def kind(self) -> Failure:
        """The kind of the report."""
        return Failure(self.report.kind)

    @property
    def error_class(self) -> type[EmulatorError]:
        """The class of the exception for this kind of report."""
        return KINDS[self.kind].error

    @property
    def finding(self) -> Finding:
        """The report as text and values."""
        report, kind = self.report, KINDS[self.kind]
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
        """Return the file and the line of an instruction, or None if it is outside of the kernel's text."""
        found = line_at(Path(self.report.object.decode()), code) if self.report.object else None
        return (found.file, found.number) if found and found.file in self.texts else None

    @property
    def thread(self) -> str:
        """The thread of the report, as text; for a race, the thread of the later access."""
        return _thread(self.report.group, self.report.thread, self.report.lane)

    @property
    def other_thread(self) -> str:
        """For a race, the thread of the earlier access, as text."""
        return _thread(self.report.other_group, self.report.other_thread, self.report.other_lane)

    @property
    def site(self) -> str:
        """The operation that the thread was at, with its line."""
        return self.at(self.report.site)

    @property
    def undefined(self) -> str:
        """A description of this mistake: an operation reads a value of a lane that takes no part in the operation."""
        return f"{self.site} reads lane {self.report.other_lane}, which takes no part in it: the value is undefined"

    @property
    def other(self) -> str:
        """The second operation, with its line, if two threads are at different operations."""
        return self.at(self.report.other)

    @property
    def what(self) -> str:
        """The operation, variable or mistake in the report."""
        return (self.report.site.what or b"").decode()

    @property
    def nearest(self) -> Region:
        """The region that contains the address, or is nearest to it."""
        return min(self.regions, key=lambda region: distance(region, self.report.address))

    def at(self, site: Site) -> str:
        """Return an operation with its line, as text."""
        return f"{(site.what or b'').decode()} ({self.line((site.file or b'body').decode(), site.line)})"

    def line(self, file: str, number: int) -> str:
        """Return the number and the text of a line of the kernel."""
        lines = self.texts.get(file, "").splitlines()
        text = f": `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else ""
        return f"{file}, line {number}{text}"

    def line_of(self, code: int) -> str:
        """Return the number and the text of the line of an instruction."""
        found = self._found(code)
        return self.line(*found) if found else "an unknown line"

    @property
    def stopped(self) -> str:
        """Where the thread stopped, as "near LINE". The exact line is unknown, because compilers move instructions."""
        return f"near {self.line_of(self.report.code)}"


def _three(of: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = of
    return x, y, z


def _thread(group: Sequence[int], thread: Sequence[int], lane: int) -> str:
    return f"threadgroup {_three(group)}, thread {_three(thread)}, lane {lane}"
