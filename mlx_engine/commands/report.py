"""The command `report`: profile forward passes, compare them with the machine's limits, and rank the bottlenecks."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_engine.commands.console import alarm, notice, reports_errors, still_bar
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import Backend, LoadOptions, Model
from mlx_engine.errors import is_number, require
from mlx_engine.options import option


@dataclass(frozen=True)
class MeasureOptions:
    """The test and its repetitions."""

    n_prompt: Annotated[int, typer.Option("--prompt", "-p", min=1, help="Number of prompt tokens.")] = 128
    n_gen: Annotated[int, typer.Option("--steps", "-n", min=0, help="Decode steps (generated tokens).")] = 16
    depth: int = option(0, "Tokens already in the context before the prompt.", flags=("--depth", "-d"), least=0)
    repetitions: int = option(5, "Number of measured rounds.", flags=("--repetitions", "-r"), least=1)
    budget: float = option(90.0, "Start no further round after this many seconds; at least one is run.")


@dataclass(frozen=True)
class PageOptions:
    """The earlier report to compare with, and the output."""

    against: Path | None = option(None, "Compare with this report.json of an earlier report.")
    anyway: bool = option(
        False, "With --against: compare even if model, machine or test differ; the report lists the differences."
    )
    out: Path | None = option(None, "Folder for report.md and report.json.", unset="bench-results/MODEL-TIME")
    json: bool = option(False, "Print the JSON instead of the Markdown.")


@reports_errors
@takes_groups
def report(
    *, model: Model = "builtin", backend: Backend = "auto", load: LoadOptions, tests: MeasureOptions, to: PageOptions
) -> None:
    """Profile a model's forward passes and rank the bottlenecks. Print a report; save it as Markdown and JSON."""
    from mlx_engine.bench.bottlenecks.page import page
    from mlx_engine.bench.bottlenecks.report import Settings
    from mlx_engine.bench.bottlenecks.report import report as measured
    from mlx_engine.bench.compare import read_report, refuse, section
    from mlx_engine.bench.origin import finding
    from mlx_engine.bench.tables import default_folder, make_folder, write

    sound = is_number(tests.budget) and tests.budget >= 0
    message = f"--budget: {tests.budget} is no number of seconds"
    require(sound, option="--budget", expected="a finite number of seconds >= 0", found=tests.budget, message=message)
    conversion = load.conversion()
    how: dict[str, Any] = {**load.types(), "allow_settings": load.allow_settings}
    settings = Settings(model, backend, load.threads, **vars(tests), **conversion.options(), **how)
    old = None if to.against is None else read_report(to.against)
    if to.out is not None:
        make_folder(to.out)  # before measuring, so that a wrong path does not waste a run

    def before(known: dict[str, Any]) -> None:
        if old is not None and not to.anyway:
            refuse(old, known)

    with still_bar() as progress:
        new = measured(settings, before=before, progress=progress)
    if new["watched"]:
        notice("warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it")
    text = page(new, None if old is None else section(old, new))
    folder = default_folder(model) if to.out is None else to.out
    make_folder(folder)
    write(folder / "report.json", json_module.dumps(new, indent=1) + "\n")
    write(folder / "report.md", text)
    print(json_module.dumps(new, indent=1) if to.json else text)
    notice(f"report.md and report.json are in {folder}")
    if (warning := finding([new])) is not None:
        alarm(warning)
