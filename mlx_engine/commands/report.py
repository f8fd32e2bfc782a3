"""`report`: where a pass spends its time, what the machine's limits would leave of it, and what to do first."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_engine.commands.bench import still_bar
from mlx_engine.commands.console import notice, reports_errors
from mlx_engine.commands.options import (
    Backend,
    Model,
    Quant,
    QuantLayers,
    QuantMinDim,
    Threads,
    layers_of,
    min_dim_of,
)
from mlx_engine.errors import is_number, require


@reports_errors
def report(
    model: Model = "builtin",
    backend: Backend = "auto",
    quant: Quant = "keep",
    quant_min_dim: QuantMinDim = "auto",
    quant_layer: QuantLayers = None,
    threads: Threads = None,
    n_prompt: Annotated[int, typer.Option("--prompt", "-p", min=1, help="Prompt tokens to read.")] = 128,
    n_gen: Annotated[int, typer.Option("--steps", "-n", min=0, help="Tokens to generate, one forward pass each.")] = 16,
    depth: Annotated[
        int, typer.Option("--depth", "-d", min=0, help="Tokens already in the context before the prompt.")
    ] = 0,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Measured rounds.")] = 5,
    budget: Annotated[
        float, typer.Option("--budget", help="Start no further round after S seconds; at least one is run.")
    ] = 90.0,
    against: Annotated[
        Path | None, typer.Option("--against", help="The report.json of an earlier report to compare with.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare even if model, machine or tests differ; the page says which.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for report.md and report.json.", show_default="bench-results/MODEL-TIME"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the Markdown.")] = False,
) -> None:
    """Profile a model's forward passes and rank the bottlenecks. Print Markdown; write it and JSON to a folder."""
    from mlx_engine.bench.bottlenecks.against import read, refuse, section
    from mlx_engine.bench.bottlenecks.page import page
    from mlx_engine.bench.bottlenecks.report import Settings
    from mlx_engine.bench.bottlenecks.report import report as measured
    from mlx_engine.bench.files import default_folder, make_folder, write
    from mlx_engine.engine import check_load_options

    require(
        is_number(budget) and budget >= 0, option="budget", expected="a finite number of seconds >= 0", found=budget
    )
    conversion = check_load_options(quant, threads, min_dim_of(quant_min_dim), layers_of(quant_layer))
    settings = Settings(model, backend, threads, n_prompt, n_gen, depth, repetitions, budget, **conversion.options())
    old = None if against is None else read(against)
    if out is not None:
        make_folder(out)  # before anything is measured for nothing

    def before(known: dict[str, Any]) -> None:
        if old is not None and not anyway:
            refuse(old, known)

    with still_bar() as progress:
        new = measured(settings, before=before, progress=progress)
    if new["watched"]:
        notice("warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it")
    text = page(new, None if old is None else section(old, new))
    folder = default_folder(model) if out is None else out
    make_folder(folder)
    write(folder / "report.json", json_module.dumps(new, indent=1) + "\n")
    write(folder / "report.md", text)
    print(json_module.dumps(new, indent=1) if json else text)
    notice(f"report.md and report.json are in {folder}")
