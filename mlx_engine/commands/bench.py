"""`bench`: tokens per second of prefill and decode, in llama-bench's habits; the whole ladder; before and after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import is_plain, notice, reports_errors
from mlx_engine.commands.options import (
    Model,
    NoJit,
    Quant,
    QuantLayers,
    QuantMinDim,
    Threads,
    layers_of,
    min_dim_of,
)
from mlx_engine.errors import OptionError, SourceError, is_number, require

if TYPE_CHECKING:
    from mlx_engine.bench.sweep import Plan
    from mlx_engine.models.conversion import Conversion

Row = dict[str, Any]

REPETITIONS = 5


@reports_errors
def bench(
    model: Model = "builtin",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            help="Backend to measure, or all; may be given several times.",
            show_default="auto; with --sweep all",
        ),
    ] = None,
    n_prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--n-prompt",
            "-p",
            help="Prompt tokens to read in a prefill test: 512, 128,512 or 64-256+64.",
            show_default="512; with --sweep what suits the model",
        ),
    ] = None,
    n_gen: Annotated[
        list[str] | None, typer.Option("--n-gen", "-n", help="Tokens to generate in a decode test.", show_default="64")
    ] = None,
    both: Annotated[
        list[str] | None,
        typer.Option("-pg", help="Prompt tokens to read and tokens to generate in one test: 512,64.", metavar="P,N"),
    ] = None,
    depth: Annotated[
        list[str] | None,
        typer.Option("--n-depth", "-d", help="Tokens already in the context when a test begins.", show_default="0"),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, help="Repetitions of every test.")
    ] = REPETITIONS,
    kv: Annotated[
        bool | None,
        typer.Option(
            "--kv/--no-kv", help="Use a KV cache, or read the whole sequence again for every token.", show_default="kv"
        ),
    ] = None,
    quant: Quant = "keep",
    quant_min_dim: QuantMinDim = "auto",
    quant_layer: QuantLayers = None,
    threads: Threads = None,
    no_jit: NoJit = False,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Wait for each token before the next forward pass is queued on a GPU.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="Seconds for each test on each backend; longer tests are estimated and marked with ~.",
            show_default="none; with --sweep 10",
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Format of the output: md, csv, json or jsonl.")] = "md",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Also write every sample to this folder as JSON, and the tables as Markdown.",
            show_default="none; with --sweep bench-results/MODEL-TIME",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Measure every backend, slowest first: tables, plots, and the factor that each step gains."
        ),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="OLD NEW", help="Compare two JSON files that bench wrote; nothing is measured."
        ),
    ] = None,
) -> None:
    """Measure prefill and decode in tokens per second. Tokenisation and a first run of every test are not timed."""
    from mlx_engine.bench.lists import tests_of
    from mlx_engine.bench.tables import FORMATS
    from mlx_engine.engine import check_load_options

    sound = budget is None or (is_number(budget) and budget >= 0)
    require(sound, option="budget", expected="a finite number of seconds >= 0", found=budget)
    require(output in FORMATS, option="output", expected=" or ".join(FORMATS), found=output)
    conversion = check_load_options(quant, threads, min_dim_of(quant_min_dim), layers_of(quant_layer))
    fixed = {
        "-pg": both,
        "-d": depth,
        "--kv or --no-kv": kv is not None,
        "--no-jit": no_jit,
        "--no-overlap": no_overlap,
    }
    if compare is not None:
        measured = {"-m": model != "builtin", "-b": backend, "-p": n_prompt, "-n": n_gen, "--budget": budget}
        shaped = {
            "--sweep": sweep,
            "--quant": quant != "keep",
            "--quant-min-dim": quant_min_dim != "auto",
            "--quant-layer": quant_layer,
            "-t": threads,
            "-r": repetitions != REPETITIONS,
            "-o": output != "md",
        }
        refuse("--compare", {**measured, **fixed, **shaped})
        print_comparison(*compare, out)
    elif sweep:
        refuse("--sweep", fixed)
        plan = plan_of(backend, n_prompt, n_gen, conversion, threads, repetitions, budget)
        run_sweep(model, plan, output, out)
    else:
        tests = tests_of(n_prompt, n_gen, both, depth)
        options = {"quant": conversion, "threads": threads, "repetitions": repetitions, "budget": budget}
        options |= {"jit": not no_jit, "overlap": not no_overlap}
        run_tests(model, names_of(backend or ["auto"]), tests, output, out, kv=(kv is not False,), **options)


def refuse(mode: str, given: dict[str, Any]) -> None:
    """Options that a mode would have to ignore.

    Raises:
        OptionError: one of them was given.
    """
    wrong = [name for name, value in given.items() if value]
    require(not wrong, option=mode, expected="no option that it would ignore", found=", ".join(wrong))


def names_of(backends: list[str]) -> list[str]:
    """The backends asked for, `all` and `auto` spelled out."""
    from mlx_engine.backends import auto, backend_names

    spelled = {"all": backend_names(), "auto": [auto()]}
    return [name for given in backends for name in spelled.get(given, [given])]


def plan_of(
    backend: list[str] | None,
    n_prompt: list[str] | None,
    n_gen: list[str] | None,
    quant: Conversion,
    threads: int | None,
    repetitions: int,
    budget: float | None,
) -> Plan:
    """What to sweep over; what was not given is left to the plan.

    Raises:
        OptionError: a list cannot be understood, or has several numbers where one is wanted.
        BackendUnavailableError: no backend has one of these names.
    """
    from mlx_engine.bench.lists import numbers
    from mlx_engine.bench.sweep import BUDGET, Plan

    gens = numbers("-n", n_gen, [Plan.n_gen])
    if len(gens) != 1:
        raise OptionError(option="-n", expected="one number with --sweep", found=",".join(map(str, gens)))
    plan = Plan(
        prompts=numbers("-p", n_prompt, []) or None,
        n_gen=gens[0],
        quant=quant,
        threads=threads,
        repetitions=repetitions,
        budget=BUDGET if budget is None else budget,
        backends=None if backend is None else names_of(backend),
    )
    plan.rungs()
    return plan


def run_tests(model: str, names: list[str], tests: list[Any], output: str, out: Path | None, **options: Any) -> None:
    """Every test on every backend; the rows on stdout, and in a folder."""
    from mlx_engine.bench.files import make_folder
    from mlx_engine.bench.run import rows
    from mlx_engine.bench.tables import FORMATS, markdown

    if out is not None:
        make_folder(out)
    found: list[Row] = []
    try:
        with still_bar() as report:
            for row in rows(model, names, tests, apart=out is not None, **options):
                keep(found, row)
                report(len(found), len(names) * len(tests), "measuring")
    finally:
        # What was measured before an error or an interruption is worth no less for it.
        if found:
            print(FORMATS[output](found))
            if output == "md":
                print(f"\nbuild: {found[0]['commit'] or found[0]['versions']['mlx-engine']}")
            if out is not None:
                save(out, "bench", found, markdown(found) + "\n")


def run_sweep(model: str, plan: Plan, output: str, out: Path | None) -> None:
    """The whole ladder; the same, and plots."""
    from mlx_engine.bench.files import default_folder, make_folder
    from mlx_engine.bench.report import page, text
    from mlx_engine.bench.sweep import sweep
    from mlx_engine.bench.tables import FORMATS

    folder = default_folder(model) if out is None else out
    make_folder(folder)
    found: list[Row] = []
    try:
        with still_bar() as report:
            for row in sweep(model, plan, report):
                keep(found, row)
    finally:
        if found:
            print(text(found) if output == "md" else FORMATS[output](found))
            save(folder, "sweep", found, page(found, draw(found, folder)))
        elif out is None:
            folder.rmdir()


def print_comparison(old: Path, new: Path, out: Path | None) -> None:
    """Before and after on stdout, and in a folder."""
    from mlx_engine.bench.compare import page
    from mlx_engine.bench.files import make_folder, write

    text = page(old, new)
    print(text)
    if out is not None:
        make_folder(out)
        write(out / "compare.md", text + "\n")


def save(folder: Path, stem: str, found: list[Row], page: str) -> None:
    """Write what was found, and say where."""
    from mlx_engine.bench import files

    files.save(folder, stem, found, page)
    notice(f"every sample is in {folder / f'{stem}.json'}")


def keep(found: list[Row], row: Row) -> None:
    """One more row; if it was measured on a backend that the log watches, that is said once."""
    if row.get("watched") and not any(other.get("watched") for other in found):
        notice("warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it")
    found.append(row)


def draw(found: list[Row], folder: Path) -> list[str]:
    """Draw the plots; return their file names, or none where matplotlib is missing or broken."""
    try:
        from mlx_engine.bench import plots
    except ImportError as error:
        notice(f"no plots: matplotlib cannot be imported ({error}); pip install --force-reinstall matplotlib")
        return []
    try:
        return plots.write(found, folder)
    except OSError as error:
        raise SourceError(f"{folder}: the plots cannot be written ({error.strerror or error})") from error


@contextmanager
def still_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar that moves when it is told and never by itself: a thread that draws would disturb what is measured."""
    if is_plain(sys.stderr):
        yield lambda done, total, title: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=None)

        def report(done: int, total: int, title: str) -> None:
            bar.update(task, completed=done, total=total, description=title, refresh=True)

        yield report
