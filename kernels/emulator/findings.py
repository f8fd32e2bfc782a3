"""What one run has found: mistakes and notes, each once, as text and as values for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Three = tuple[int, int, int]
# Further mistakes that a message lists after the first.
SHOWN = 8


@dataclass(frozen=True)
class Place:
    """A thread and the line of the kernel's text that it executes.

    Attributes:
        threadgroup: its position in the grid.
        thread: its position in the threadgroup.
        file: "body" or "header"; None if the line is unknown.
        line: from 1 on; 0 if it is unknown.
    """

    threadgroup: Three
    thread: Three
    file: str | None
    line: int


@dataclass(frozen=True)
class Finding:
    """A mistake, or a note about something that may be meant.

    Attributes:
        kind: "fault", "race", "divergence", "undefined", "hang" or "stopped"; for notes "same value", "truncation",
            "unwritten", "not written" or "shifted".
        is_note: whether the kernel may be right.
        text: the description, several lines.
        place: where it was seen first.
        other: of a race, the access that came before.
        times: how often it was seen until the run ended.
    """

    kind: str
    is_note: bool
    text: str
    place: Place
    other: Place | None = None
    times: int = 1

    def __str__(self) -> str:
        return self.text + (f"\n  ({self.times:,} times in this run)" if self.times > 1 and self.is_note else "")


# From what explains most to what explains least: a read out of bounds may be the cause of all others.
_SPECIFIC = ("fault", "race", "divergence", "unwritten", "undefined")


def severity(finding: Finding | None) -> int:
    """Return the rank of a finding among those of one kernel: the lower, the more it explains. None: a wrong value."""
    if finding is None:
        return len(_SPECIFIC) + 1
    return _SPECIFIC.index(finding.kind) if finding.kind in _SPECIFIC else len(_SPECIFIC)


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings without those that differ only in the instruction or the thread."""
    first: dict[object, Finding] = {}
    for one in findings:
        other = one.other and (one.other.file, one.other.line)
        what = one.text if one.place.file is None else ""
        if one.kind == "not written":  # one of each output, whatever its sizes
            what = one.text.partition(" elements ")[2].partition(" were ")[0]
        key = (one.kind, one.place.file, one.place.line, other, what)
        first[key] = replace(first[key], times=first[key].times + one.times) if key in first else one
    return tuple(first.values())


def message(kernel: str, findings: Sequence[Finding]) -> str:
    """Return the text of an error: the first finding, then the others."""
    first, *others = findings
    lines = [f"kernel '{kernel}': {first.text}"]
    lines += [f"also: {one.text}" for one in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"and {len(others) - SHOWN} more")
    return "\n  ".join("\n".join(lines).splitlines())
