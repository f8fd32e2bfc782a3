"""The command `inspect`: show and verify the contents of a model file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlx_engine.commands.console import FAILED, notice, progress_bar, reports_errors, safe_for
from mlx_engine.commands.model_overview import print_all, print_value
from mlx_engine.commands.options.model import AllowSetting
from mlx_engine.commands.outlook_rows import run_facts
from mlx_engine.commands.tensor_list import print_tensors
from mlx_engine.commands.values import plain, print_json
from mlx_engine.errors import OptionError, Words, require


@reports_errors
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="GGUF file, safetensors file, Hugging Face folder, hub id org/repo[:file], or builtin.",
            show_default="builtin",
        ),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as the argument.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print only the list of tensors.")] = False,
    filter_: Annotated[
        str | None,
        typer.Option("--filter", help="Print only tensors whose name contains this text or matches this glob."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also print each tensor's min, max, mean and standard deviation.")
    ] = False,
    head: Annotated[
        int | None, typer.Option("--head", min=0, help="Also print the first N values of each tensor.")
    ] = None,
    meta: Annotated[
        str | None, typer.Option("--meta", help="Print only the value of this metadata key, in full.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="Print the memory and the rate on this backend.")
    ] = "auto",
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Print the memory and the rate for a conversation of N tokens.",
            show_default="the model's, at most 4,096",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check that the model is complete and can be run, and that all its values are finite."
        ),
    ] = False,
    allow_setting: AllowSetting = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the header, metadata and tensors of a model without loading it, and how it would run here."""
    from mlx_engine.checkpoint.listing import open_listing
    from mlx_engine.checkpoint.sources import resolve

    list_tensors = tensors or filter_ is not None or stats or head is not None
    if list_tensors + (meta is not None) + verify > 1:
        raise OptionError(option="inspect", expected="one of --tensors, --meta and --verify", found=Words("several"))
    require(verify or not allow_setting, option="--allow-setting", expected="--verify with it", found=allow_setting)
    require(model is None or model_option is None, option="--model", expected="no model as an argument", found=model)
    path = resolve(next((name for name in (model, model_option) if name is not None), "builtin"))
    if verify:
        raise typer.Exit(print_findings(path, allow_setting or (), as_json=json))
    listing = open_listing(path)
    if meta is not None:
        print_value(listing, meta, as_json=json)
    elif list_tensors:
        rows = listing.select(filter_)
        if not rows and listing.tensors:
            notice(f"{path}: none of the {len(listing.tensors):,} tensors matches {filter_!r}")
        print_tensors(listing, rows, stats=stats, head=head, as_json=json)
    else:
        print_all(listing, run_facts(path, backend, context), as_json=json)


def print_findings(path: Path, allow_settings: Sequence[str], *, as_json: bool) -> int:
    """Print the outcome of every check and return the exit code."""
    from mlx_engine.convert.verify import Level
    from mlx_engine.convert.verify import verify as verified

    with progress_bar("checking tensors") as progress:
        findings = verified(path, allow_settings, progress=progress)
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    code = FAILED if counts["FAIL"] else 0
    if as_json:
        rows = [{"level": f.level.value, "check": f.check, "detail": f.detail} for f in findings]
        print_json({"path": str(path), "ok": not code, "counts": counts, "findings": rows})
        return code
    colors = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}
    for finding in findings:
        level = typer.style(finding.level.value, fg=colors[finding.level.value])
        typer.echo(f"{level}  {finding.check:<10} {safe_for(sys.stdout, finding.detail)}")
    print(f"{plain(str(path))}: {counts['PASS']} passed, {counts['WARN']} to note, {counts['FAIL']} failed")
    return code
