"""What a check found, as values, and as text for a person who looks for a mistake."""

from __future__ import annotations

from dataclasses import dataclass, field

# Shapes whose labels a message lists.
SHOWN = 8


@dataclass(frozen=True)
class Failure:
    """A shape that goes wrong.

    Attributes:
        shape: the sizes of the axes, and the type that T stands for.
        seed: of the order in which threads ran; on a GPU, the number of the run. None where runs differ.
        build: the emulator's build that noticed; None on a GPU.
        text: what went wrong.
    """

    shape: str
    seed: int | None
    build: str | None
    text: str


@dataclass
class Verdict:
    """The outcome of a check; true if everything was right, and readable when printed.

    Attributes:
        name: of the kernel.
        executor: who ran it.
        shapes: how many were tried.
        runs: with all seeds and builds.
        worst: the largest error, in the unit of `bound`.
        bound: the error that is accepted, for an experiment in float32 epsilons (2^-23) of its magnitude.
        failures: shapes that go wrong, the smallest first.
        seconds: that it took, compiling included.
        compile_seconds: of these, compiling.
        again: how to run the smallest of them alone, as Python.
    """

    name: str
    executor: str
    bound: float
    shapes: int = 0
    runs: int = 0
    worst: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    compile_seconds: float = 0.0
    again: str = ""

    @property
    def passed(self) -> bool:
        """Whether all shapes were right."""
        return self.runs > 0 and not self.failures

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        head = f"{self.name} ({self.executor}): {self.shapes} shapes, {self.runs} runs"
        if self.passed:
            return f"{head}, all right; worst error {self.worst:.2f} of {self.bound:g} allowed"
        first, *others = self.failures
        lines = [f"{head}, {len(self.failures)} shapes wrong", f"smallest: {first.shape}", f"  {where(first)}"]
        lines += [f"  {line}" for line in first.text.splitlines()]
        if others:
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            lines.append("also wrong: " + "; ".join(failure.shape for failure in others[:SHOWN]) + more)
        if self.again:
            lines.append(f"again: {self.again}")
        return "\n".join(lines)

    __repr__ = __str__


def where(failure: Failure) -> str:
    """Which run it was."""
    seed = "all seeds" if failure.seed is None else f"seed {failure.seed}"
    return seed if failure.build is None else f"{seed}, build {failure.build!r}"
