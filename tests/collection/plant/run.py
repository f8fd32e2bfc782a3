"""Check sound kernels, then the same with a bug each, as `kernels.check` does with its default settings."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.emulator import EmulatorError
from kernels.lab.check import Orders, Verdict, check_cases
from tests.collection.plant.bug import Bug
from tests.collection.plant.bugs import BUGS
from tests.collection.plant.subjects import OURS, Subject, our_subjects, subjects_of
from tests.collection.repositories import Repository

_LINE = re.compile(r"\b(?:body|header|[\w.]+\.(?:h|metal)), line \d+: |\b(?:body|header|[\w.]+\.(?:h|metal)):\d+:\d+: ")
_THREAD = re.compile(r"\bthread \(\d+, \d+, \d+\)")
# Every text of the emulator that says what to do has one of these words.
_ADVICE = re.compile(
    r"(?m)\b(?:check|put|let|guard|use|move|compare|pass|clamp|make|declare|to silence) |(?:;|^) *write |"
    r"must reach|hint:|expected (?:an?|at most|the same|less|one)\b|cannot |are read-only|has no "
)


@dataclass
class Planted:
    """What came of a bug, or of a sound kernel, whose kind is "".

    Attributes:
        caught: whether it was reported: of a sound kernel, whether there was a finding.
        line: whether the message has the line.
        threads: whether it has the thread, or none has run.
        advice: whether it says what to do.
        text: the message.
    """

    kernel: str
    kind: str
    name: str
    caught: bool
    line: bool = False
    threads: bool = False
    advice: bool = False
    text: str = ""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether it was reported with line, threads and advice."""
        return self.caught and self.line and self.threads and self.advice


def plant(repository: Repository | None, folder: Path, names: list[str]) -> Iterator[Planted]:
    """Check the kernels of a repository, or ours, in which bugs are planted; yield each, then its bugs."""
    path = repository.path if repository else OURS
    here = [bug for bug in BUGS if bug.kernel.split()[0] == path and (not names or any(n in bug.name for n in names))]
    used: set[int] = set()
    for subject in subjects_of(repository, folder) if repository else our_subjects():
        words = set(subject.name.split())
        its = [i for i, bug in enumerate(here) if set(bug.kernel.split()) <= words and i not in used]
        used |= set(its)
        if not its:
            continue
        yield _sound(subject)
        for i in its:
            yield _with(subject, here[i])
    for i, bug in enumerate(here):
        if i not in used:
            yield Planted(bug.kernel, bug.kind, bug.name, False, text="no such kernel")


def _sound(subject: Subject) -> Planted:
    start = time.perf_counter()
    verdict = check_cases(subject.name, subject.cases, "emulator", Orders(), bound=subject.bound)
    return Planted(
        subject.name, "", "", not verdict.passed, text="" if verdict else str(verdict), seconds=_since(start)
    )


def _with(subject: Subject, bug: Bug) -> Planted:
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as empty:
            verdict = check_cases(
                subject.name, subject.planted(bug, Path(empty)), "emulator", Orders(), bound=subject.bound
            )
        caught, text = _message(verdict, bug)
    except EmulatorError as error:  # the text of a .metal file is refused before it is launched
        caught, text = True, str(error)
    except ValueError as error:  # the bug does not fit the text
        caught, text = False, str(error)
    threads = bool(_THREAD.search(text)) or re.search("does not compile|is not valid in Metal", text) is not None
    line, advice = bool(_LINE.search(text)), bool(_ADVICE.search(text))
    return Planted(subject.name, bug.kind, bug.name, caught, line, threads, advice, text, _since(start))


def _message(verdict: Verdict, bug: Bug) -> tuple[bool, str]:
    """Return whether a check has found a bug, and with which words."""
    if verdict.clearest is not None:
        return True, verdict.clearest.text
    notes = [str(note) for note in verdict.notes if note.kind == bug.note]
    return bool(notes), "\n".join(notes)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 1)
