"""`backends`: what this machine has, and why not the rest."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from mlx_engine.commands.console import reports_errors


@reports_errors
def backends(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the backends, slowest first: which work on this machine, and why the others do not."""
    from mlx_engine.backends import auto, backend_names, summary, unavailable

    rows = [{"name": name, "summary": summary(name), "unavailable": unavailable(name)} for name in backend_names()]
    if json:
        print(json_module.dumps({"auto": auto(), "backends": rows}))
        return
    for row in rows:
        state = "yes" if row["unavailable"] is None else f"no: {row['unavailable']}"
        print(f"{row['name']:<10}{row['summary']:<66}{state}")
    print(f"{'auto':<10}stands for {auto()} on this machine")
