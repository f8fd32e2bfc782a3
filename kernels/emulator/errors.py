"""Findings of a run (mistakes and possible mistakes), and the exceptions of the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


class EmulatorError(Exception):
    """The base class of all errors of a kernel or its call.

    Attributes:
        findings: all mistakes of the run; the message begins with the first one. There are none if the kernel did not
            run, and in an OrderError, which compares two runs.
    """

    findings: tuple[Finding, ...] = ()


class LaunchError(EmulatorError, ValueError):
    """A call has a wrong number of arrays, or an invalid shape, dtype, grid or option."""


class CompilerMissingError(EmulatorError):
    """There is no usable compiler."""


class CompileError(EmulatorError):
    """Clang refuses the kernel."""


class LintError(CompileError):
    """The text breaks a rule of Metal or MLX that clang does not check."""


class MemoryFaultError(EmulatorError):
    """A thread accessed memory out of bounds, or wrote to an input.

    Attributes:
        seen: how the access was found. "at once": by a fault in an unmapped page. "afterwards": by changed bytes beside
            an array. "exactly": by a check of every access; only the build "races" has these checks.
    """

    seen: Literal["at once", "afterwards", "exactly"] = "at once"


class ConvergenceError(EmulatorError):
    """Not all threads reach a SIMD-group operation or a barrier together."""


class UndefinedBehaviorError(EmulatorError):
    """A thread executed undefined behaviour: signed overflow, or a wrong index, shift, division, alignment, or cast."""


class TensorError(EmulatorError):
    """A tensor, or an operation on tensors, is used in a way that the specification leaves undefined."""


class RaceError(EmulatorError):
    """Two threads access the same memory, at least one of them writes, and no barrier or atomic orders the accesses."""


class HangError(EmulatorError):
    """A threadgroup does not end."""


class OrderError(EmulatorError):
    """Two orders of threads give different results."""


# ---- causes ----


def root_cause(error: EmulatorError, build: str, repeat: Callable[[str], Any]) -> EmulatorError:
    """If an index beyond a private array caused `error`, return the error that reports the index, otherwise `error`.

    A build is the kernel compiled with some of the checks. Only the build "undefined" checks indices of private arrays
    (variables of a thread). In other builds, a write beyond a private array damages other variables, and `error` may be
    a consequence. So the run is repeated in "undefined".

    Args:
        error: the error of the run.
        build: the name of the build that was run.
        repeat: a function that runs the kernel again, in the build with the given name.
    """
    if build == "undefined" or not error.findings or isinstance(error, HangError | RaceError):
        return error
    try:
        repeat("undefined")
    except UndefinedBehaviorError as cause:
        return cause if "index beyond" in str(cause) else error
    except EmulatorError:
        pass
    return error


Three = tuple[int, int, int]
SHOWN = 8  # the largest number of mistakes that a message lists after the first one


@dataclass(frozen=True)
class Place:
    """A thread and the line of the kernel's text that it executes."""

    threadgroup: Three  # the position of the thread's threadgroup in the grid
    thread: Three  # the position of the thread in its threadgroup
    file: str | None  # "body", "header", or the name of a .metal or included file; None if the line is unknown
    line: int  # counted from 1; 0 if it is unknown


@dataclass(frozen=True)
class Finding:
    """A mistake, or a note about a possible mistake.

    Attributes:
        kind: "fault", "race", "divergence", "undefined", "tensor", "hang" or "stopped" (interrupted); for notes "same
            value" (written by two threads), "truncation" (of a converted number), "unwritten" (a read of memory that no
            thread has written), "not written" (elements of an output that no thread has written), "shifted" (a shift
            operation that reads an inactive lane), "writer" (which thread wrote an element), "barrier" (one that orders
            no memory) or "address space".
        is_note: whether this is only a possible mistake, so that the kernel may be right.
        text: the description, several lines.
        place: the first thread and line with this mistake.
        other: for a race, the place of the earlier access.
        times: how often the mistake occurred in the run.
    """

    kind: str
    is_note: bool
    text: str
    place: Place
    other: Place | None = None
    times: int = 1

    def __str__(self) -> str:
        return self.text + (f"\n  ({self.times:,} times in this run)" if self.times > 1 and self.is_note else "")


# Kinds of findings, causes before consequences: an access out of bounds may be the cause of all other findings.
_CAUSES_FIRST = ("fault", "race", "divergence", "unwritten", "undefined")


def severity(finding: Finding | None) -> int:
    """Return the rank of a finding, 0 for the most severe. None stands for a wrong value without a finding."""
    if finding is None:
        return len(_CAUSES_FIRST) + 1
    return _CAUSES_FIRST.index(finding.kind) if finding.kind in _CAUSES_FIRST else len(_CAUSES_FIRST)


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings, with all findings of the same kind at the same line merged into one.

    If the line is unknown, merge the findings of the same kind with the same text.
    """
    first: dict[object, Finding] = {}
    for one in findings:
        other = one.other and (one.other.file, one.other.line)
        what = one.text if one.place.file is None else ""
        if one.kind == "not written":  # merge all findings on the same output, even if its shape differs between calls
            what = one.text.partition(" elements ")[2].partition(" were ")[0]
        key = (one.kind, one.place.file, one.place.line, other, what)
        first[key] = replace(first[key], times=first[key].times + one.times) if key in first else one
    return tuple(first.values())


def message(kernel: str, findings: Sequence[Finding]) -> str:
    """Return the text of an error: the first finding, then at most `SHOWN` others."""
    first, *others = findings
    lines = [f"kernel '{kernel}': {first.text}"]
    lines += [f"also: {one.text}" for one in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"and {len(others) - SHOWN} more")
    return "\n  ".join("\n".join(lines).splitlines())
