"""Error messages for faults: kernel, line, threadgroup, thread, buffer, byte, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .descriptions import KINDS
from .errors import EmulatorError
from .findings import Finding, Place
from .lines import line_at
from .runtime import Failure, Report, Site


class Region(NamedTuple):
    """Memory of a kernel: an input, an output, or an array in threadgroup memory."""

    name: str  # input 'x'
    start: int
    bytes: int
    read_only: bool = False
    item: int = 1  # bytes of an element

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
