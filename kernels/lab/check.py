"""`check`: compare a kernel with its float64 reference in many shapes, in several orders of its threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..emulator import EmulatorError, Finding
from ..emulator.errors import merged, root_cause, severity
from ..emulator.intercept import first_true
from ..launch import ExecutorName, Launch, require
from ..launch import executor as default_executor
from ..metal.reference import Expected
from .arrays import FLOATS, Sizes, in_numpy
from .experiment import Experiment, check_orders, check_sizes, check_switches
from .metal_experiment import MetalExperiment, MetalLaunch
from .run import BUILDS, SEEDS, notes_of, prepare, run, statistics_of

# ---- the result of a check ----

# The largest number of shapes, and of notes, that a message lists.
SHOWN = 8


@dataclass(frozen=True)
class Failure:
    """A shape with a wrong result.

    Attributes:
        shape: the sizes of the axes, and the type that T stands for.
        seed: seed of the order of threads; on a GPU, the number of the run. None if runs with different seeds differ.
        build: the emulator's build that found the mistake; None on a GPU.
        text: a description of the mistake.
        findings: the mistakes that the emulator found; for a wrong value, the emulator's notes on possible causes.
        rank: how specific the text is: 0 (most specific) for an access out of bounds or a kernel that did not run; the
            largest number for wrong values of unknown cause.
    """

    shape: str
    seed: int | None
    build: str | None
    text: str
    findings: tuple[Finding, ...] = ()
    rank: int = severity(None)


@dataclass
class Verdict:
    """The outcome of a check: true if all results were right. `print(verdict)` shows the mistakes.

    Attributes:
        shapes: number of shapes that were run.
        runs: number of runs of the kernel; a shape runs several times, with different seeds and builds.
        worst: the largest error found, in the unit of `bound`.
        bound: the largest accepted error. For an experiment, the unit is a float32 epsilon (2^-23) times
            `Experiment.magnitude`.
        failures: the shapes with wrong results, in the order in which they ran.
        notes: possible mistakes that the emulator found.
        seconds: duration, including compilation (`compile_seconds`).
        again: Python code that runs only the shape of `clearest`.
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
        """The failure with the most specific text; of equally specific failures, the first."""
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


DTYPES = ("float32", "float16")
EPSILON = 2.0**-23  # float32's
# A check stops after this number of wrong shapes.
MOST_FAILURES = 4
# If a kernel compares numbers, it also runs in this number of shapes with inputs that have many equal numbers.
TIED_SHAPES = 4
# Maps a type to the largest error of rounding to it: (relative error, absolute error of subnormal numbers).
ROUNDING = {mx.float16: (2.0**-11, 2.0**-25), mx.bfloat16: (2.0**-8, 0.0)}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """One shape of a check.

    Attributes:
        label: the sizes of the axes, and the type that T stands for, as text.
        expected: function that returns the expected outputs.
        arguments: arguments of `check`, as Python code, that run only this shape; "" if there is no experiment.
    """

    label: str
    launch: Launch | MetalLaunch
    expected: Callable[[], Sequence[Expected]]
    arguments: str = ""


@dataclass(frozen=True)
class Orders:
    """The orders in which threads run (`seeds`), the emulator's builds, and its switches.

    The switches are those of an `Experiment`: with `lanes` "all", all lanes must take part in SIMD-group operations;
    with `suffixes`, floating-point literals must have a suffix. CUDA requires both.
    """

    seeds: Sequence[int] = SEEDS
    builds: Sequence[str] = BUILDS
    lanes: str = "active"
    suffixes: bool = False

    def of(self, build: str | None) -> Sequence[int]:
        """Return the seeds of a build: for "races" only one, because this build is slow, and any seed reveals races."""
        return self.seeds[:1] if build == "races" else self.seeds


def check(
    experiment: Experiment | MetalExperiment,
    sizes: Mapping[str, Sequence[int]] | Sequence[Sizes] | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    executor: ExecutorName | None = None,
    seeds: Sequence[int] = SEEDS,
    builds: Sequence[str] = BUILDS,
    lanes: str | None = None,
    suffixes: bool | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Run a kernel over many shapes and compare its outputs with its reference in float64.

    In the emulator, threads run in a different order with each seed. A result whose bits depend on the order is wrong,
    however small the difference; exceptions are atomic outputs and kernels that use `matmul2d`. A GPU chooses the order
    itself, so on a GPU the seeds only set how often each shape runs.

    Args:
        experiment: the kernel.
        sizes: a list of shapes, [{"N": 33, "K": 64}]; or a list of sizes for each axis, {"N": [1, 33], "K": [64]}, to
            run all combinations. The default is the experiment's `sizes`; if they are None, `Experiment.ragged` chooses
            up to 25 shapes.
        dtypes: the types that T stands for.
        executor: "metal", "cuda" or "emulator"; by default the first of these that this machine has. A MetalExperiment
            runs only in the emulator.
        seeds: seeds of the orders of threads.
        builds: the emulator's builds. All find accesses out of bounds. "undefined" also finds undefined behaviour such
            as overflow; "races" also finds data races, and runs with the first seed only.
        lanes: "active" or "all"; by default the experiment's `lanes`.
        suffixes: True or False; by default the experiment's `suffixes`.
        progress: called after each shape with the number of finished shapes and the number of all shapes. By default, a
            progress bar is shown if stderr is a terminal.

    Raises:
        ValueError: there is nothing to run, an argument is wrong, or the reference returns a wrong shape.
        ExecutorUnavailableError: the machine lacks the executor.
    """
    chosen = executor or ("emulator" if isinstance(experiment, MetalExperiment) else default_executor())
    if isinstance(experiment, MetalExperiment) and chosen != "emulator":
        raise ValueError(f"check {experiment.name}: expected the emulator for a .metal file, found {chosen!r}")
    require(chosen)
    lanes = experiment.lanes if lanes is None else lanes
    suffixes = experiment.suffixes if suffixes is None else suffixes
    check_switches(experiment.name, lanes, suffixes)
    check_orders(experiment.name, seeds, builds)
    changed = "".join(
        f", {name}={value!r}"
        for name, value in (("lanes", lanes), ("suffixes", suffixes))
        if value != getattr(experiment, name)
    )
    if isinstance(experiment, MetalExperiment):
        made = [_metal_case(experiment, one) for one in _every_size(experiment.name, sizes, experiment.sizes)]
    else:
        made = cases_of(experiment, sizes, dtypes)
    cases = [replace(case, arguments=case.arguments + changed) for case in made]
    orders = Orders(seeds, builds, lanes, suffixes)
    with _shown(experiment.name, progress) as report:
        return check_cases(experiment.name, cases, chosen, orders, bound=experiment.bound, wary=True, progress=report)


@contextmanager
def _shown(name: str, given: Progress | None) -> Iterator[Progress | None]:
    """Yield `given`; if it is None and stderr is a terminal, yield a function that shows a progress bar."""
    if given is not None or not sys.stderr.isatty():
        yield given
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"checking {name}, shapes", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def cases_of(
    experiment: Experiment, sizes: Mapping[str, Sequence[int]] | Sequence[Sizes] | None, dtypes: Sequence[str]
) -> list[Case]:
    """Return a case per shape and type, the smallest first. For kernels that compare numbers, add cases with ties."""
    unknown = [dtype for dtype in dtypes if dtype not in FLOATS]
    if unknown or isinstance(dtypes, str):
        raise ValueError(f"check {experiment.name}: expected dtypes, a list of {', '.join(FLOATS)}, found {dtypes!r}")
    tried = dtypes if experiment.has_choice else DTYPES[:1]
    sizes = experiment.sizes if sizes is None else sizes
    every = _every_size(experiment.name, sizes, experiment.ragged() if sizes is None else ())
    made = [_case(experiment, one, dtype) for one in every for dtype in tried]
    if not experiment.compares:
        return made
    # Choose large shapes, because the few numbers of a small shape are rarely equal. Leave out the largest shape, which
    # usually serves only to reveal 16-bit indices.
    chosen = every[:-1][-TIED_SHAPES:] or every
    return made + [_case(experiment, one, tried[0], tied=True) for one in chosen]


def _every_size(
    name: str, sizes: Mapping[str, Sequence[int]] | Sequence[Sizes] | None, default: Sequence[Sizes]
) -> list[Sizes]:
    """Return all shapes of `sizes` (see `check`), the smallest first. If `sizes` is None, use the shapes `default`."""
    if sizes is None:
        return sorted(default, key=lambda s: prod(s.values()))
    check_sizes(name, sizes)
    every: Sequence[Sizes]
    if isinstance(sizes, Mapping):
        lists = [size if isinstance(size, Sequence) else [size] for size in sizes.values()]
        every = [dict(zip(sizes, chosen, strict=True)) for chosen in product(*lists)]
    else:
        every = sizes
    return sorted(every, key=lambda s: prod(s.values()))


def _metal_case(experiment: MetalExperiment, sizes: Sizes) -> Case:
    launch, values = experiment.launch(sizes)

    def expected() -> list[Expected]:
        return [Expected(value, experiment.bound * EPSILON * _scale(value)) for value in values()]

    label = " ".join(f"{name}={size}" for name, size in sizes.items()) or "its launch"
    return Case(label, launch, expected, f"[{dict(sizes)}]")


def _scale(value: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the shape of `value`, filled with the largest finite absolute number of `value`."""
    return np.full(value.shape, np.max(np.abs(value), initial=0, where=np.isfinite(value)), np.float64)


def _case(experiment: Experiment, sizes: Sizes, dtype: str, *, tied: bool = False) -> Case:
    launch, numbers = experiment.launch(sizes, dtype, tied=tied)

    def expected() -> list[Expected]:
        results = experiment.expected(sizes, numbers)
        return [Expected(value, experiment.bound * EPSILON * magnitude) for value, magnitude in results]

    arguments = f"[{dict(sizes)}]" + (f', dtypes=["{dtype}"]' if experiment.has_choice else "")
    label = experiment.label(sizes, dtype) + (", of few distinct numbers" if tied else "")
    return Case(label, launch, expected, arguments)


def check_cases(
    name: str,
    cases: Sequence[Case],
    executor: ExecutorName,
    orders: Orders,
    *,
    bound: float,
    wary: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Run the cases sequentially, until `MOST_FAILURES` of them are wrong.

    The emulator compiles the cases together. With `wary`, it compiles and runs the first `MOST_FAILURES` cases before
    it compiles the rest: most new kernels are wrong, and the check of a wrong kernel often ends there.
    """
    if not cases or not orders.seeds or not orders.builds:
        raise ValueError(
            f"check {name}: expected at least one shape, one seed and one build, "
            f"found {len(cases)}, {len(orders.seeds)} and {len(orders.builds)}"
        )
    verdict, started = Verdict(name, executor, bound), time.perf_counter()
    units = {0: cases[:MOST_FAILURES], MOST_FAILURES: cases[MOST_FAILURES:]} if wary else {0: cases}
    for i, case in enumerate(cases):
        if executor == "emulator" and i in units:
            verdict.compile_seconds += compile_cases(units[i], orders)
        ratio, runs, failure, notes = _examine(case, executor, orders)
        verdict.notes = merged([*verdict.notes, *notes])
        verdict.shapes, verdict.runs = verdict.shapes + 1, verdict.runs + runs
        verdict.worst = max(verdict.worst, ratio * bound)
        if failure is not None:
            verdict.failures.append(failure)
            if verdict.clearest is failure and case.arguments:
                seeds = "" if failure.seed is None else f", seeds=[{failure.seed}]"
                verdict.again = f"kernels.check({name}, {case.arguments}{seeds})"
        if progress is not None:
            progress(verdict.shapes, len(cases))
        if len(verdict.failures) == MOST_FAILURES:
            break
    verdict.seconds = time.perf_counter() - started
    return verdict


def compile_cases(cases: Sequence[Case], orders: Orders) -> float:
    """Compile the cases together; return the seconds.

    The code is not optimised: for a few runs on small arrays, optimisation would take longer than it saves.
    """
    started = time.perf_counter()
    # Ignore compilation errors here: a case that does not compile raises the same error when it runs.
    with suppress(EmulatorError):
        prepare((case.launch for case in cases), orders.builds, suffixes=orders.suffixes, optimize=False)
    return time.perf_counter() - started


def _examine(
    case: Case, executor: ExecutorName, orders: Orders
) -> tuple[float, int, Failure | None, tuple[Finding, ...]]:
    """Return the largest ratio of an error to its bound, the number of runs, the failure or None, and notes."""
    expected, worst, runs, undefined, any_order = case.expected(), 0.0, 0, "", case.launch.atomic_outputs
    notes: tuple[Finding, ...] = ()
    switches = {"lanes": orders.lanes, "suffixes": orders.suffixes}
    for build in orders.builds if executor == "emulator" else (None,):
        results: dict[int, list[NDArray[Any]]] = {}
        for seed in orders.of(build):
            runs += 1
            try:
                outputs = _run(case.launch, executor, build, {**switches, "seed": seed})
            except (EmulatorError, RuntimeError, ValueError) as error:  # errors of compilers, the emulator and MLX
                return worst, runs, _raised(case, seed, build, error), notes
            results[seed] = [in_numpy(output) for output in outputs]
            if executor == "emulator":
                statistics = statistics_of(case.launch)
                notes += notes_of(case.launch)
                undefined = f"\n{statistics.undefined}" if statistics.undefined else ""
                any_order |= statistics.tensor_operations > 0  # Metal does not define the order of sums in `matmul2d`
        wrong = None if any_order else _unsteady(case.launch, results)
        if wrong is not None:
            return worst, runs, _wrong(case, None, build, wrong, undefined, orders), notes
        for seed, arrays in results.items():
            ratio, wrong = compare(case.launch, arrays, expected)
            worst = max(worst, ratio)
            if wrong is not None:
                return worst, runs, _wrong(case, seed, build, wrong, undefined, orders), notes
    return worst, runs, None, notes


def _raised(case: Case, seed: int | None, build: str | None, error: Exception) -> Failure:
    found: tuple[Finding, ...] = getattr(error, "findings", ())
    rank = min(map(severity, found), default=0)  # an error without findings says why the kernel did not run
    return Failure(case.label, seed, build, str(error), found, rank)


def _wrong(case: Case, seed: int | None, build: str | None, wrong: Wrong, undefined: str, orders: Orders) -> Failure:
    """Return the failure for a wrong value. If another build raises an error, the text begins with this error."""
    if build is None:
        return Failure(case.label, seed, build, wrong.text)
    error, causes = _causes(case.launch, orders, wrong)
    if error is not None:
        failure = _raised(case, seed, error[0], error[1])
        return replace(failure, text=f"{failure.text}\n{wrong.text}{undefined}")
    text = "\n".join([wrong.text + undefined, *map(str, causes)])
    rank = min((severity(one) for one in causes if one.kind == "unwritten"), default=severity(None))
    return Failure(case.label, seed, build, text, causes, rank)


def _run(launch: Launch | MetalLaunch, executor: ExecutorName, build: str | None, options: dict[str, Any]) -> list[Any]:
    """Return the outputs of a launch. If the emulator raises an error, raise its `root_cause` instead."""
    try:
        return run(launch, executor, build=build, **options)
    except EmulatorError as error:
        again = partial(run, launch, executor, **options)
        raise root_cause(error, str(build), lambda other: again(build=other)) from None


def _causes(
    launch: Launch | MetalLaunch, orders: Orders, wrong: Wrong
) -> tuple[tuple[str, EmulatorError] | None, tuple[Finding, ...]]:
    """Run the launch again in the builds "undefined" and "races", and return possible causes of a wrong element.

    The result is a pair: the most specific error as (build, error), or None if there was none; and the notes. If it is
    known which thread wrote the element last, the final note names this thread.
    """
    place = launch.output_names.index(wrong.output)
    shape = tuple(launch.output_shapes[place])
    index = int(np.ravel_multi_index(wrong.at, shape)) if wrong.at else 0
    found: list[Finding] = []
    errors: list[tuple[str, EmulatorError]] = []
    for build, trace in (("undefined", None), ("races", None), ("races", (wrong.output, index))):
        options = {"build": build, "seed": orders.seeds[0], "lanes": orders.lanes, "suffixes": orders.suffixes}
        try:
            run(launch, "emulator", **options, **({"trace": trace} if trace else {}))
        except EmulatorError as error:
            if error.findings and trace is None:
                errors.append((build, error))
            continue
        found += [note for note in notes_of(launch) if note.kind in ("unwritten", "not written", "truncation")]
    writer = statistics_of(launch).writer
    best = min(errors, key=lambda one: min(map(severity, one[1].findings)), default=None)
    return best, (*merged(found), *((writer,) if writer else ()))


class Wrong(NamedTuple):
    """A wrong element: the name of its output, its index (`at`), and a description."""

    output: str
    at: tuple[int, ...]
    text: str


def _unsteady(launch: Launch | MetalLaunch, results: Mapping[int, list[NDArray[Any]]]) -> Wrong | None:
    """Return the first element that differs between runs with different seeds, or None."""
    (first, reference), *others = results.items()
    for seed, found in others:
        for name, one, other in zip(launch.output_names, reference, found, strict=True):
            differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
            if differs.any():
                at = first_true(differs)
                text = f"{element(name, at)}: {one[at]:.9g} with seed {first}, {other[at]:.9g} with seed {seed}\n"
                text += "the result depends on the order of threads, or on memory that no thread has written"
                return Wrong(name, at, text)
    return None


def compare(
    launch: Launch | MetalLaunch, found: Sequence[NDArray[Any]], expected: Sequence[Expected]
) -> tuple[float, Wrong | None]:
    """Return the largest ratio of an error to its bound in all outputs, and the first wrong element or None."""
    worst, first = 0.0, None
    for name, dtype, got, (value, bound) in zip(
        launch.output_names, launch.output_dtypes, found, expected, strict=True
    ):
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            relative, absolute = ROUNDING.get(dtype, (0.0, 0.0)) if dtype else (0.0, 0.0)
            distance = np.abs(got.astype(np.float64) - value)
            error = np.maximum(distance - np.maximum(relative * np.abs(value), absolute), 0)
            same = (got == value) | (error == 0) | (np.isnan(got) & np.isnan(np.asarray(value, dtype=np.float64)))
            ratio = np.where(same, 0.0, np.nan_to_num(error / bound, nan=np.inf, posinf=np.inf))
        worst = max(worst, float(ratio.max(initial=0.0)))
        wrong = ratio > 1
        if first is None and wrong.any():
            first = Wrong(name, first_true(wrong), _described(name, got, value, wrong, ratio))
    return worst, first


def _described(name: str, got: NDArray[Any], value: NDArray[Any], wrong: NDArray[Any], ratio: NDArray[Any]) -> str:
    at = first_true(wrong)
    lines = [f"{element(name, at)}: expected {value[at]:.9g}, found {got[at]:.9g}"]
    if np.issubdtype(got.dtype, np.floating) and np.isnan(got[at]):
        lines[0] += "; it was never written, or computed from unwritten memory"
    elif np.issubdtype(got.dtype, np.integer) and int(got[at]) in (-1, np.iinfo(got.dtype).max):
        lines[0] += "; all its bits are set: it was never written, or computed from unwritten memory"
    elif np.isfinite(ratio[at]):
        lines[0] += f", {ratio[at]:.3g} times the error that is allowed"
    lines.append(f"{int(wrong.sum()):,} of {wrong.size:,} numbers of {name} are wrong, this is the first")
    return "\n".join(lines)


def element(name: str, at: tuple[int, ...]) -> str:
    """Return an element's name, such as "y[0, 32]"."""
    return f"{name}[{', '.join(map(str, at))}]" if at else name
