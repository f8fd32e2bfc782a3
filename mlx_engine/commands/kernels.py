"""The command `kernels`: list, check and benchmark the GPU kernels, and print their source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import FAILED, notice, progress_bar, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.help import Command, Group
from mlx_engine.commands.values import columns, print_json
from mlx_engine.errors import OptionError, listed
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.kernels.lab.catalog import Entry
    from mlx_engine.kernels.lab.check import Orders, Verdict
    from mlx_engine.kernels.launch import ExecutorName

kernels = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    help="List, check and measure the GPU kernels, or print their source.",
)

Executor = Annotated[
    str | None,
    typer.Option(
        "--executor", "-e", help="Run on metal, cuda or emulator.", show_default="the first that this machine has"
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@kernels.command("list", cls=Command)
@reports_errors
@takes_groups
def list_(json: AsJSON = False) -> None:
    """List the kernels: purpose, inputs and outputs. Rungs are kernels of the same Q8_0 product, from slow to fast."""
    from mlx_engine.kernels.lab.catalog import entries
    from mlx_engine.kernels.launch import executors

    every, runs_on = entries(), executors()
    if json:
        print_json({"executors": runs_on, "kernels": [described(entry) for entry in every]})
        return
    for entry in every:
        rung = "" if entry.rung is None else f" (rung {entry.rung})"
        print(f"{entry.name}{rung}: {entry.summary}")
        print(f"    {', '.join(entry.kernel.input_names)} -> {', '.join(entry.kernel.output_names)}")
        print(f"    {entry.about.needs}")
    print()
    for name, reason in runs_on.items():
        print(f"{name:<10}{'yes' if reason is None else f'no: {reason}'}")


def described(entry: Entry) -> dict[str, Any]:
    """Return a kernel as JSON fields."""
    return {
        "name": entry.name,
        "rung": entry.rung,
        "summary": entry.summary,
        "inputs": entry.kernel.input_names,
        "outputs": entry.kernel.output_names,
        **entry.about._asdict(),
    }


@kernels.command(cls=Command)
@reports_errors
@takes_groups
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Python program to run in the emulator, which checks its mx.fast.metal_kernel calls and Experiment "
            "objects; or a .metal file, whose kernels are compiled in every build of the emulator.",
            show_default="the project's kernels",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of the program; with a .metal FILE, a Python file with MetalExperiment objects for its "
            "kernels.",
            show_default=False,
        ),
    ] = None,
    kernel: list[str] | None = option(
        None, "Kernel to check; may be given several times.", flags=("--kernel", "-k"), unset="all"
    ),
    executor: Executor = None,
    seeds: int = option(2, "Number of thread orders to try; on a GPU, number of runs.", least=2),
    races: bool = option(
        True, "Also run each shape (with FILE, each call) once more to find data races.", flags=("--races/--no-races",)
    ),
    lanes: str = option(
        "active",
        "With FILE: active runs SIMD-group operations over the lanes that reach them, as in Metal; all requires all 32 "
        "lanes to reach them, as in CUDA.",
    ),
    suffixes: bool = option(False, "With FILE: refuse float literals without a suffix, which are doubles in CUDA."),
    include: list[Path] | None = option(
        None, "With a .metal FILE: folder of the files that it includes.", flags=("--include", "-I")
    ),
    json: AsJSON = False,
) -> None:
    """Run every kernel over ragged shapes, in several thread orders, and compare the results with float64.

    With FILE, check the kernels of that file instead.
    """
    from mlx_engine.kernels.lab.catalog import check_entries
    from mlx_engine.kernels.lab.check import Orders
    from mlx_engine.kernels.lab.run import BUILDS, UNOPTIMIZED_BUILDS

    if file is not None:
        if kernel or executor not in (None, "emulator"):
            message = "a FILE is checked in the emulator, as a whole: leave out --kernel and --executor"
            raise OptionError(message, option="FILE", found=str(file))
        orders = Orders(range(seeds), BUILDS if races else BUILDS[:-1], lanes, suffixes)
        if not check_kernel_file(file, arguments or (), orders, include or (), json=json):
            raise typer.Exit(FAILED)
        return
    if suffixes or include or lanes != "active":
        raise OptionError("--lanes, --suffixes and --include need a FILE", option="FILE")
    every, name = chosen(kernel), executor_of(executor)
    orders = Orders(range(seeds), UNOPTIMIZED_BUILDS if races else UNOPTIMIZED_BUILDS[:-1])
    with progress_bar("checking") as report:
        verdicts = check_entries(every, name, orders, report)
    passed = all(verdicts)
    if json:
        print_json({"executor": name, "passed": passed, "kernels": [as_row(v) for v in verdicts]})
    else:
        print_verdicts(every, verdicts)
    if not passed:
        raise typer.Exit(FAILED)


def as_row(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict (the result of a kernel's check) as JSON fields."""
    return {**asdict(verdict), "passed": verdict.passed}


def print_verdicts(every: list[Entry], verdicts: list[Verdict]) -> None:
    """Print a table of verdicts, then the details of every verdict that failed or has notes."""
    rows = [("kernel", "shapes", "runs", "worst", "bound", "in units of", "seconds", "")]
    for entry, verdict in zip(every, verdicts, strict=True):
        outcome = "ok" if verdict.passed else f"{len(verdict.failures)} shapes WRONG"
        numbers = f"{verdict.shapes}", f"{verdict.runs}", f"{verdict.worst:.2f}", f"{verdict.bound:g}"
        rows.append((verdict.name, *numbers, entry.about.unit, f"{verdict.seconds:.1f}", outcome))
    print("\n".join(columns(rows, "<>>>><><")))
    shapes, runs = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("shapes", "runs"))
    seconds = sum(verdict.seconds for verdict in verdicts)
    compiling = sum(verdict.compile_seconds for verdict in verdicts)
    took = f"{seconds:.1f} s" + (f", {compiling:.1f} s of them to compile" if compiling >= 0.05 else "")
    print(f"\n{len(verdicts)} kernels, {shapes:,} shapes, {runs:,} runs on {verdicts[0].executor}: {took}")
    for verdict in verdicts:
        if not verdict.passed or verdict.notes:
            print(f"\n{verdict}")


@kernels.command(cls=Command)
@reports_errors
@takes_groups
def bench(
    report: bool = option(False, "Also write a report to share: the printed table, the chip, and tokens per second."),
    file: Annotated[
        Path | None,
        typer.Argument(help="The file that --report writes: Markdown, or .json.", show_default="kernels-CHIP.md"),
    ] = None,
    model: str = option(
        "shape:qwen3-0.6b",
        "Model whose matrices are multiplied; --report also generates tokens with it.",
        flags=("--model", "-m"),
    ),
    executor: Executor = None,
    vectors: int = option(1, "Number of vectors (tokens) in one product.", least=1, most=512),
    budget: float | None = option(None, "With --report: seconds for each measurement of tokens per second.", least=0),
    json: AsJSON = False,
) -> None:
    """Benchmark every matrix product kernel on a model's matrices with cold caches, and compare with MLX."""
    from mlx_engine.bench import kernel_report

    if file is not None and not report:
        raise OptionError("FILE needs --report", option="FILE", found=str(file))
    name = executor_of(executor, only_gpu=True)
    path = None
    if report:
        path = kernel_report.default_file() if file is None else file
        kernel_report.check_file(path)
    with progress_bar("measuring") as progress:
        found = kernel_report.measure(model, name, vectors=vectors, progress=progress)
        if path is not None:
            kernel_report.write_report(path, found)  # to keep these results if a later measurement fails
            kernel_report.add_prompts(found, model)
            kernel_report.write_report(path, found)
            kernel_report.add_models(found, model, budget=budget)
    if json:
        print_json(found)
    else:
        print(kernel_report.summary(found))
    if path is not None:
        kernel_report.write_report(path, found)
        notice(f"the report is in {path}; the only file name in it is the model's")


@kernels.command(cls=Command)
@reports_errors
@takes_groups
def source(
    name: Annotated[str, typer.Argument(help="Name of a kernel, as in `kernels list`.")],
    body: bool = option(False, "Print only the body, as in the kernel's file."),
    cuda: bool = option(False, "Print the translation to CUDA."),
) -> None:
    """Print a kernel's source as MLX generates it for a typical launch, without MLX's preamble."""
    (entry,) = chosen([name])
    if body and cuda:
        raise OptionError("--body cannot be combined with --cuda", option="--body")
    if body:
        print(entry.kernel.source, end="")
    else:
        print(entry.cuda_text() if cuda else entry.metal_text())


def chosen(names: list[str] | None) -> list[Entry]:
    """Return the kernels with these names, or all; raise OptionError if a name is unknown."""
    from mlx_engine.kernels.lab.catalog import entries

    every = {entry.name: entry for entry in entries()}
    for name in names or ():
        if name not in every:
            message = f"--kernel: no kernel {name!r}; choose {listed(every)}"
            raise OptionError(message, option="--kernel", found=name)
    return [every[name] for name in names] if names else list(every.values())


def executor_of(given: str | None, *, only_gpu: bool = False) -> ExecutorName:
    """Return the given executor; if it is None, return the first executor that this machine has.

    Raises:
        OptionError: the given executor is unknown or unavailable; or `given` is None, and the machine has no executor
            or, with `only_gpu`, only the emulator.
    """
    from mlx_engine.kernels.launch import EXECUTORS, executors

    if given is not None and given not in EXECUTORS:
        message = f"--executor: no executor {given!r}; choose {listed(EXECUTORS)}"
        raise OptionError(message, option="executor", found=given)
    reasons = executors()
    have = [name for name, reason in reasons.items() if reason is None]
    if given is not None and given not in have:
        others = f"; available here: {', '.join(have)}" if have else ""
        raise OptionError(f"--executor {given}: {reasons[given]}{others}", option="executor", found=given)
    if not have:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise OptionError(f"no executor works here: {why}", option="executor")
    if given is None and only_gpu and have[0] == "emulator":
        message = "no GPU here, and the emulator cannot predict a GPU's times; --executor emulator counts operations"
        raise OptionError(message, option="executor")
    return given or have[0]


def check_kernel_file(
    file: Path, arguments: Sequence[str], orders: Orders, folders: Sequence[Path], *, json: bool
) -> bool:
    """Check a program or a .metal file, print the report, and return whether the check passed.

    `folders` are searched for the files that a .metal file includes. With `json`, the stdout of the checked program is
    redirected to stderr.

    Raises:
        OptionError: a file does not exist, --lanes has an unknown value, or the emulator does not run here.
    """
    from mlx_engine.kernels.emulator import unavailable
    from mlx_engine.kernels.emulator.kernel import LANES
    from mlx_engine.kernels.lab.check_file import check_file

    reason = unavailable()
    if reason is not None:
        raise OptionError(f"FILE needs the emulator: {reason}", option="FILE", found=reason)
    if orders.lanes not in LANES:
        message = f"--lanes must be {listed(LANES)}, not {orders.lanes!r}"
        raise OptionError(message, option="--lanes", found=orders.lanes)
    if not file.is_file():
        raise OptionError(f"{file}: no such Python file or .metal file", option="FILE", found=str(file))
    if file.suffix == ".metal" and arguments and not Path(arguments[0]).is_file():
        message = f"{arguments[0]}: no such file; after a .metal FILE comes a Python file with MetalExperiment objects"
        raise OptionError(message, option="FILE", found=arguments[0])
    with redirect_stdout(sys.stderr if json else sys.stdout):
        report = check_file(file, arguments, orders=orders, folders=folders)
    if json:
        print_json({**asdict(report), "passed": report.passed})
    else:
        print(report)
    return report.passed
