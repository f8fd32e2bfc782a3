"""The result of a check, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..emulator import Finding
from ..emulator.findings import severity

# Shapes whose labels a message lists.
SHOWN = 8


@dataclass(frozen=True)
class Failure:
    """A shape with a wrong result.

    Attributes:
        shape: the sizes of the axes, and the type that T stands for.
        seed: seed of the order of threads; on a GPU, the number of the run. None if runs differ.
        build: the emulator's build that found it; None on a GPU.
        text: description of the mistake.
        findings: all mistakes of that run in the emulator, as values.
        rank: how much the text explains, from 0 on: accesses out of bounds first, wrong values without a cause last.
    """

    shape: str
    seed: int | None
    build: str | None
    text: str
    findings: tuple[Finding, ...] = ()
    rank: int = severity(None)


@dataclass
class Verdict:
    """The outcome of a check; true if everything was right, and readable when printed.

    Attributes:
        name: name of the kernel.
        executor: the executor.
        shapes: number of shapes.
        runs: number of runs with all seeds and builds.
        worst: the largest error, in the unit of `bound`.
        bound: the largest accepted error, for an experiment in float32 epsilons (2^-23) of its magnitude.
        failures: wrong shapes, the smallest first.
        notes: what may be a mistake, in the emulator.
        seconds: duration, including compilation.
        compile_seconds: duration of compilation.
        again: Python code that runs the shape alone that `clearest` is about.
    """

    name: str
    executor: str
    bound: float
    shapes: int = 0
    runs: int = 0
    worst: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    notes: tuple[Finding, ...] = ()
    seconds: float = 0.0
    compile_seconds: float = 0.0
    again: str = ""

    @property
    def passed(self) -> bool:
        """Whether all shapes are right."""
        return self.runs > 0 and not self.failures

    @property
    def clearest(self) -> Failure | None:
        """The failure that explains most: of the most specific kind, the smallest shape."""
        return min(self.failures, key=lambda failure: failure.rank, default=None)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        head = f"{self.name} ({self.executor}): {self.shapes} shapes, {self.runs} runs"
        if self.passed:
            right = f"{head}, all right; worst error {self.worst:.2f} of {self.bound:g} allowed"
            return "\n".join([right, *self._notes()])
        first, *others = sorted(self.failures, key=lambda failure: failure is not self.clearest)
        which = "smallest" if first is self.failures[0] else "clearest"
        lines = [f"{head}, {len(self.failures)} shapes wrong", f"{which}: {first.shape}", f"  {where(first)}"]
        lines += [f"  {line}" for line in first.text.splitlines()]
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            lines.append("also wrong: " + "; ".join(failure.shape for failure in others[:SHOWN]) + more)
        if self.again:
            lines.append(f"again: {self.again}")
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        return ["\n  ".join(f"note: {note}".splitlines()) for note in self.notes[:SHOWN]]

    __repr__ = __str__


def where(failure: Failure) -> str:
    """Return the seed and the build of a failure as text."""
    seed = "all seeds" if failure.seed is None else f"seed {failure.seed}"
    return seed if failure.build is None else f"{seed}, build {failure.build!r}"
