"""Check a file with a user's kernels: run a Python program in the emulator, or compile a .metal file.

This is the command `kernels check FILE`.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..emulator import Calls, EmulatorError, Finding, emulate
from ..emulator.metal_library import address_space_notes, compile_metal_file
from .check import Orders, Verdict, check
from .experiment import Experiment
from .metal_experiment import MetalExperiment

_OURS = str(Path(__file__).parents[1])


@dataclass
class FileReport:
    """The result of the check of a file.

    Attributes:
        calls: maps each kernel made by `mx.fast.metal_kernel` to the number of its calls without a mistake.
        verdicts: the results of the file's experiments.
        compiled: the kernels of a .metal file that compile in every build of the emulator. Maps each kernel to the
            names of the other instantiations of its template, which are not compiled.
        findings: the mistakes as text, including errors that the program caught with `except`. The error or non-zero
            exit status that ended the program is also a finding; its text begins with the file and line that raised it.
        uncalled: kernels that were created but not called. If a kernel did not compile, or the program had a mistake,
            the list is empty, because the program may have ended before it called all kernels.
        notes: maps the name of a kernel, or of the .metal file, to its possible mistakes.
        mistakes: the mistakes that the emulator found while the program ran, as `Finding` objects.
    """

    file: str
    calls: dict[str, int] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    compiled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    uncalled: list[str] = field(default_factory=list)
    notes: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    mistakes: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether at least one kernel ran or compiled, and no mistake was found."""
        return not self.findings and all(self.verdicts) and bool(self.calls or self.verdicts or self.compiled)

    def __str__(self) -> str:
        lines = []
        for name, n in self.calls.items():
            blank = any(note.kind == "not written" for note in self.notes.get(name, ()))
            outcome = "no mistake, but some of the output was not written" if blank else "all right"
            lines.append(f"{name}: {n} call{'s' * (n > 1)}, {outcome}")
        ran = {verdict.name for verdict in self.verdicts}
        for name, others in self.compiled.items():
            also = f" (and {len(others)} more instantiation{'s' * (len(others) > 1)}, not compiled)" if others else ""
            run = "" if ran & {name, *others} else "; not run: no experiment"
            lines.append(f"{name}: compiles in every build{also}{run}")
        lines += [f"{name}: made, never called" for name in self.uncalled]
        lines += [str(verdict) for verdict in self.verdicts]
        lines += self.findings
        for name, notes in self.notes.items():
            where = "" if name.endswith(".metal") else f"kernel '{name}': "
            lines += ["\n  ".join(f"note: {where}{note}".splitlines()) for note in notes]
        if not lines:
            lines.append(
                f"{self.file}: expected calls of kernels of mx.fast.metal_kernel, or kernels.Experiment objects, "
                "found neither; the file must itself import mlx.core and call its kernels when it runs"
            )
        return "\n".join(lines)


def check_file(
    file: Path, arguments: Sequence[str] = (), *, orders: Orders | None = None, folders: Sequence[Path] = ()
) -> FileReport:
    """Check a Python file or a .metal file.

    A Python file is run as a program. Its calls of `mx.fast.metal_kernel` kernels are checked, then its experiments.

    The kernels of a .metal file are compiled in every build of the emulator. To run these kernels with arrays, pass a
    Python file with `MetalExperiment` objects as the first of `arguments`. The Python program gets the other arguments.

    `orders` has the orders of threads (by default those of the seeds 0 and 1), and the emulator's builds and switches.
    Files that a .metal file names with `#include "..."` are searched for in the folder of the .metal file, and in
    `folders`.

    Raises:
        FileNotFoundError: there is no such file, or the first argument after a .metal file is not a Python file.
        CompilerMissingError: there is no clang.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a file")
    orders = orders or Orders((0, 1))
    report = FileReport(str(file))
    if file.suffix == ".metal":
        try:
            compiled = compile_metal_file(file, folders)
        except EmulatorError as error:
            report.findings = [str(error)]
            return report
        if notes := address_space_notes(file, folders):
            report.notes[file.name] = notes
        report.compiled = {one.name: one.others for one in compiled if not one.error}
        report.findings = [f"{one.name}: {one.error}" for one in compiled if one.error]
        if not arguments:
            return report
        file, *arguments = Path(arguments[0]), *arguments[1:]
        if not file.is_file() or file.suffix != ".py":
            raise FileNotFoundError(f"{file}: expected a Python file with kernels.MetalExperiment objects")
    for experiment in _run(file, arguments, orders, report):
        try:
            report.verdicts.append(_checked(experiment, orders))
        except Exception as error:  # raised by a function of the experiment, or because of the function's result
            report.findings.append(_described(error, file))
    return report


def _checked(experiment: Experiment | MetalExperiment, orders: Orders) -> Verdict:
    return check(
        experiment,
        executor="emulator",
        seeds=orders.seeds,
        builds=orders.builds,
        lanes="all" if orders.lanes == "all" else None,
        suffixes=orders.suffixes or None,
    )


def _run(file: Path, arguments: Sequence[str], orders: Orders, report: FileReport) -> list[Any]:
    """Run the program, and write its calls and mistakes to `report`. Return the experiments in its global variables."""
    found: dict[str, Any] = {}
    calls = Calls()
    ended: BaseException | None = None
    with _as_program(file, arguments):
        try:
            with emulate(
                builds=orders.builds, seeds=orders.seeds, lanes=orders.lanes, suffixes=orders.suffixes
            ) as calls:
                found = runpy.run_path(str(file), run_name="__main__")
        except SystemExit as error:
            found = _program_globals(error)
            ended = error if error.code else None
        except Exception as error:
            ended = error
    report.calls = dict(Counter(call.kernel for call in calls.calls))
    report.uncalled = [name for name in dict.fromkeys(calls.made) if name not in report.calls]
    report.findings += dict.fromkeys(str(error) for error in calls.findings if error is not ended)
    report.mistakes = list(dict.fromkeys(finding for error in calls.findings for finding in error.findings))
    report.notes |= calls.notes
    if ended is not None:
        report.findings.append(_described(ended, file))
    if report.findings:
        report.uncalled = []
    return list(dict.fromkeys(value for value in found.values() if isinstance(value, Experiment | MetalExperiment)))


def _program_globals(error: BaseException) -> dict[str, Any]:
    """Return the global variables of a program that ended with `error`, from the traceback of the error."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame.f_globals for frame in frames if frame.f_globals.get("__name__") == "__main__"), {})


@contextmanager
def _as_program(file: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as for a program."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(file), *arguments], [str(file.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _described(error: BaseException, file: Path) -> str:
    """Return "FILE:LINE: error". LINE is the innermost line in the traceback that is not from a file in `kernels/`."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen"))
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(file)
    kind = "" if isinstance(error, EmulatorError) else f"{type(error).__name__}: "
    return f"{where}: {kind}{error}"
