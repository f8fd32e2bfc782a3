"""`check`: compare a kernel with float64 over ragged shapes, in several orders of its threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.emulator import EmulatorError, Finding, RaceError
from kernels.emulator.findings import merged
from kernels.lab.arrays import FLOATS, Sizes, in_numpy
from kernels.lab.experiment import Experiment
from kernels.lab.run import BUILDS, SEEDS, notes_of, prepare, require, run, undefined_reads
from kernels.lab.validate import check_orders, check_sizes, check_switches
from kernels.lab.verdict import Failure, Verdict
from kernels.launch import ExecutorName, Launch
from kernels.launch import executor as default_executor
from kernels.metal.twins import Expected

DTYPES = ("float32", "float16")
EPSILON = 2.0**-23  # float32's
# Stop after this many wrong shapes. The same number is compiled before the rest, because most new kernels are wrong.
MOST_FAILURES = 4
# Half a unit in the last place: relative, and absolute for tiny numbers.
ROUNDING = {mx.float16: (2.0**-11, 2.0**-25), mx.bfloat16: (2.0**-8, 0.0)}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """A launch, its expected outputs, and its sizes as a label and as Python code."""

    label: str
    launch: Launch
    expected: Callable[[], Sequence[Expected]]
    arguments: str = ""


@dataclass(frozen=True)
class Orders:
    """The orders in which threads run, and the emulator's builds and switches."""

    seeds: Sequence[int] = SEEDS
    builds: Sequence[str] = BUILDS
    lanes: str = "active"
    suffixes: bool = False

    def of(self, build: str | None) -> Sequence[int]:
        """Return the seeds of a build: data races are found in any order of threads, and slowly, so one is enough."""
        return self.seeds[:1] if build == "races" else self.seeds


def check(
    experiment: Experiment,
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

    Threads run in a different order with each seed. A result whose bits depend on the order is wrong, however small the
    difference. A GPU chooses the order itself, so each shape runs once per seed.

    Args:
        experiment: the kernel.
        sizes: a list of sizes, {"N": 33, "K": 64}; or for each axis the sizes that are combined with those of all
            others, {"N": [1, 33], "K": [64]}. Without it, 24 ragged shapes.
        dtypes: the types that T stands for.
        executor: "metal", "cuda" or "emulator"; without it, the first of them that this machine has.
        seeds: seeds of the orders of threads.
        builds: the emulator's builds: "spaces" finds accesses out of bounds, "undefined" overflow, "races" data races,
            with the first seed only.
        lanes: "active" or "all", instead of the experiment's `lanes`.
        suffixes: instead of the experiment's `suffixes`.
        progress: called after each shape with the number of finished shapes and of all shapes.

    Returns:
        The verdict. Print it, or use it as a truth value.

    Raises:
        ValueError: there is nothing to run, an argument is wrong, or the sizes or the reference's shape do not fit the
            experiment.
        ExecutorUnavailableError: the machine lacks the executor.
    """
    chosen = executor or default_executor()
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
    cases = [replace(case, arguments=case.arguments + changed) for case in cases_of(experiment, sizes, dtypes)]
    orders = Orders(seeds, builds, lanes, suffixes)
    return check_cases(experiment.name, cases, chosen, orders, bound=experiment.bound, wary=True, progress=progress)


def cases_of(
    experiment: Experiment, sizes: Mapping[str, Sequence[int]] | Sequence[Sizes] | None, dtypes: Sequence[str]
) -> list[Case]:
    """Return a case for each of the sizes and types, the smallest first."""
    unknown = [dtype for dtype in dtypes if dtype not in FLOATS]
    if unknown or isinstance(dtypes, str):
        raise ValueError(f"check {experiment.name}: expected dtypes, a list of {', '.join(FLOATS)}, found {dtypes!r}")
    if sizes is not None:
        check_sizes(experiment.name, sizes)
    if sizes is None:
        every: Sequence[Sizes] = experiment.ragged()
    elif isinstance(sizes, Mapping):
        lists = [size if isinstance(size, Sequence) else [size] for size in sizes.values()]
        every = [dict(zip(sizes, chosen, strict=True)) for chosen in product(*lists)]
    else:
        every = sizes
    tried = dtypes if experiment.has_choice else DTYPES[:1]
    return [_case(experiment, one, dtype) for one in sorted(every, key=lambda s: prod(s.values())) for dtype in tried]


def _case(experiment: Experiment, sizes: Sizes, dtype: str) -> Case:
    launch, numbers = experiment.launch(sizes, dtype)

    def expected() -> list[Expected]:
        results = experiment.expected(sizes, numbers)
        return [Expected(value, experiment.bound * EPSILON * magnitude) for value, magnitude in results]

    arguments = f"[{dict(sizes)}]" + (f', dtypes=["{dtype}"]' if experiment.has_choice else "")
    return Case(experiment.label(sizes, dtype), launch, expected, arguments)


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
    """Run the cases sequentially, until enough of them are wrong.

    The emulator compiles them together; with `wary` it compiles the first ones separately, because most kernels under
    development are wrong.
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
            verdict.compile_seconds += _prepare(units[i], orders)
        ratio, runs, failure, notes = _examine(case, executor, orders)
        verdict.notes = merged([*verdict.notes, *notes])
        verdict.shapes, verdict.runs = verdict.shapes + 1, verdict.runs + runs
        verdict.worst = max(verdict.worst, ratio * bound)
        if failure is not None:
            if not verdict.failures and case.arguments:
                seeds = "" if failure.seed is None else f", seeds=[{failure.seed}]"
                verdict.again = f"kernels.check({name}, {case.arguments}{seeds})"
            verdict.failures.append(failure)
        if progress is not None:
            progress(verdict.shapes, len(cases))
        if len(verdict.failures) == MOST_FAILURES:
            break
    verdict.seconds = time.perf_counter() - started
    return verdict


def _prepare(cases: Sequence[Case], orders: Orders) -> float:
    """Compile the cases as one unit; return the seconds that this took.

    Every case runs a few times on small arrays, so optimisation would take longer than it saves.
    """
    started = time.perf_counter()
    # A case that does not compile reports this when it runs.
    with suppress(EmulatorError):
        prepare((case.launch for case in cases), orders.builds, suffixes=orders.suffixes, optimize=False)
    return time.perf_counter() - started


def _examine(
    case: Case, executor: ExecutorName, orders: Orders
) -> tuple[float, int, Failure | None, tuple[Finding, ...]]:
    """Return the largest error as a share of its bound, the number of runs, the failure, if any, and notes."""
    expected, worst, runs, undefined = case.expected(), 0.0, 0, ""
    notes: tuple[Finding, ...] = ()
    switches = {"lanes": orders.lanes, "suffixes": orders.suffixes}
    for build in orders.builds if executor == "emulator" else (None,):
        results: dict[int, list[NDArray[Any]]] = {}
        for seed in orders.of(build):
            runs += 1
            try:
                outputs = run(case.launch, executor, seed=seed, build=build, **switches)
            except (EmulatorError, RuntimeError, ValueError) as error:  # compilers', the emulator's and MLX's
                found = getattr(error, "findings", ())
                return worst, runs, Failure(case.label, seed, build, str(error), found), notes
            notes += notes_of(case.launch) if executor == "emulator" else ()
            results[seed] = [in_numpy(output) for output in outputs]
            undefined = undefined_reads(case.launch) if executor == "emulator" else ""
        text = None if case.launch.kernel.atomic_outputs else _unsteady(case.launch, results)
        if text is not None:
            causes = _causes(case.launch, orders) if executor == "emulator" else ()
            text = "\n".join([text + undefined, *map(str, causes)])
            return worst, runs, Failure(case.label, None, build, text, causes), notes
        for seed, arrays in results.items():
            ratio, text = compare(case.launch, arrays, expected)
            worst = max(worst, ratio)
            if text is not None:
                return worst, runs, Failure(case.label, seed, build, text + undefined), notes
    return worst, runs, None, notes


def _causes(launch: Launch, orders: Orders) -> tuple[Finding, ...]:
    """Return the races, or reads of memory that nobody has written, that may make results differ between runs."""
    try:
        run(launch, "emulator", seed=orders.seeds[0], build="races", lanes=orders.lanes, suffixes=orders.suffixes)
    except RaceError as error:
        return error.findings
    except EmulatorError:
        return ()
    return tuple(note for note in notes_of(launch) if note.kind == "unwritten")


def _unsteady(launch: Launch, results: Mapping[int, list[NDArray[Any]]]) -> str | None:
    """Return a description of a difference between runs, or None."""
    (first, reference), *others = results.items()
    for seed, found in others:
        for name, one, other in zip(launch.kernel.output_names, reference, found, strict=True):
            differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
            if differs.any():
                at = _first(differs)
                return (
                    f"{element(name, at)}: {one[at]:.9g} with seed {first}, {other[at]:.9g} with seed {seed}\n"
                    "the result depends on the order of threads, or on memory that nobody has written"
                )
    return None


def compare(launch: Launch, found: Sequence[NDArray[Any]], expected: Sequence[Expected]) -> tuple[float, str | None]:
    """Return the largest error of all outputs as a share of its bound, and the first wrong element."""
    worst, text = 0.0, None
    for name, dtype, got, (value, bound) in zip(
        launch.kernel.output_names, launch.output_dtypes, found, expected, strict=True
    ):
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            relative, absolute = ROUNDING.get(dtype, (0.0, 0.0))
            distance = np.abs(got.astype(np.float64) - value)
            error = np.maximum(distance - np.maximum(relative * np.abs(value), absolute), 0)
            same = (got == value) | (error == 0) | (np.isnan(got) & np.isnan(np.asarray(value, dtype=np.float64)))
            ratio = np.where(same, 0.0, np.nan_to_num(error / bound, nan=np.inf, posinf=np.inf))
        worst = max(worst, float(ratio.max(initial=0.0)))
        wrong = ratio > 1
        if text is None and wrong.any():
            text = _described(name, got, value, wrong, ratio)
    return worst, text


def _described(name: str, got: NDArray[Any], value: NDArray[Any], wrong: NDArray[Any], ratio: NDArray[Any]) -> str:
    at = _first(wrong)
    lines = [f"{element(name, at)}: expected {value[at]:.9g}, found {got[at]:.9g}"]
    if np.issubdtype(got.dtype, np.floating) and np.isnan(got[at]):
        lines[0] += "; it was never written, or made of what nobody wrote"
    elif np.issubdtype(got.dtype, np.integer) and int(got[at]) in (-1, np.iinfo(got.dtype).max):
        lines[0] += "; all its bits are set: it was never written, or made of what nobody wrote"
    elif np.isfinite(ratio[at]):
        lines[0] += f", {ratio[at]:.3g} times the error that is allowed"
    lines.append(f"{int(wrong.sum()):,} of {wrong.size:,} numbers of {name} are wrong, this is the first")
    return "\n".join(lines)


def _first(wrong: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def element(name: str, at: tuple[int, ...]) -> str:
    """Return the name of an element of an output: "y[0, 32]"."""
    return f"{name}[{', '.join(map(str, at))}]" if at else name
