"""How a case ended."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.collection.case import Case, Suite
from tests.collection.suite_plugin import Places


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        verdict: "right", "differs", the name of the emulator's error, "failed" for a project's own tests, or "error" if
            the case itself failed.
        kernels: the places in the project that made the kernels that ran: file and line, or of a kernel of
            a .metal file the file and the kernel.
        wrong: those of them in which the emulator found a mistake.
        text: the error, or by how much the results differ.
    """

    repository: str
    case: str
    verdict: str
    kernels: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    text: str = ""
    bug: str | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether a sound kernel ran and was right, or the bug of another was reported."""
        return self.verdict.endswith(("Error", "differs")) if self.bug else self.verdict == "right"


def ended(one: Case | Suite, verdict: str, text: str, places: Places, start: float) -> Outcome:
    """Return the outcome of a case that began at `start`."""
    wrong = sorted(place for place in places if places[place])
    seconds = round(time.perf_counter() - start, 1)
    return Outcome(one.repository, one.name, verdict, sorted(places), wrong, text, one.bug, seconds)


def as_dictionary(one: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON can hold it."""
    return asdict(one)
