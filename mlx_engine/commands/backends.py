"""The command `backends`: list backends and their availability; with a model, also the GPU dispatches of one token."""

from __future__ import annotations

import json as json_module
from typing import Any

from mlx_engine.commands.console import reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import AllowSetting
from mlx_engine.options import option

# Backends whose GPU dispatches are counted.
ON_GPU = ("mlx", "metal", "cuda")


@reports_errors
@takes_groups
def backends(
    model: str | None = option(
        None, "Also print the GPU dispatches of one token of this model, and the bytes read.", flags=("--model", "-m")
    ),
    allow_setting: AllowSetting = None,
    json: bool = option(False, "Print one JSON object."),
) -> None:
    """List the backends, slowest first, and say why this machine cannot run some of them."""
    from mlx_engine.backends import auto, backend_names, summary, unavailable

    rows: list[dict[str, Any]] = [
        {"name": name, "summary": summary(name), "unavailable": unavailable(name)} for name in backend_names()
    ]
    if model is not None:
        from mlx_engine.bench.dispatches import decode_cost

        for row in rows:
            if row["name"] in ON_GPU and row["unavailable"] is None:
                row["decode"] = decode_cost(model, row["name"], allow_setting or ())
    if json:
        print(json_module.dumps({"auto": auto(), "backends": rows}))
        return
    for row in rows:
        state = "yes" if row["unavailable"] is None else f"no: {row['unavailable']}"
        print(f"{row['name']:<10}{row['summary']:<66}{state}")
    print(f"{'auto':<10}selects {auto()} on this machine")
    for row in rows:
        if "decode" in row:
            counted = "MLX's operations count as the dispatches that they need on Metal"
            print(f"\nGPU dispatches of one token of {model} on {row['name']} ({counted}):")
            print("".join(f"  {note}\n" for note in row["decode"].get("notes", ())), end="")
            print("\n".join(cost_lines(row["decode"])))


def cost_lines(cost: dict[str, Any]) -> list[str]:
    """Format a result of `decode_cost`, the cost of a pass of one token, as lines."""
    return [
        f"  {cost['per_layer']} dispatches per layer: {_listed(cost['layer'])}",
        *(
            [f"  {cost['per_layer_from_1024_keys']} per layer from 1,024 cached tokens on"]
            if cost["per_layer_from_1024_keys"] != cost["per_layer"]
            else []
        ),
        f"  {sum(cost['around'].values())} outside the {cost['layers']} layers: {_listed(cost['around'])}; "
        f"{cost['per_step']} in all",
        f"  {cost['weight_bytes'] / 1e6:,.2f} MB of weights are read, and {cost['cache_bytes_per_token'] / 1e3:,.1f} "
        "kB of keys and values for every cached token",
    ]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{name} {count}" for name, count in sorted(counts.items()))
