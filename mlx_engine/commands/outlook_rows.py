"""The rows of `inspect` about a run on this machine: supported or not, memory, and the rate of decode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_engine.commands.values import plain
from mlx_engine.errors import EngineError, size


def run_facts(path: Path, backend: str, context: int | None) -> dict[str, Any]:
    """Return what would happen if the model were loaded: `supported`, and the reason or the sizes and the rate."""
    from mlx_engine.bench.outlook import machine_bandwidth, outlook
    from mlx_engine.machine.cores import usable_cores

    if path.suffix == ".safetensors" and path.is_file():
        return {"supported": False, "reason": "a file of tensors without a config.json; name the folder of the model"}
    try:
        found = outlook(path, backend, context)
    except EngineError as error:
        return {"supported": False, "reason": str(error)}
    bandwidth = machine_bandwidth(1 if found.backend == "simd" else usable_cores())
    rates = {"bandwidth_bytes_per_second": bandwidth, "decode_tokens_per_second": found.rate(bandwidth)}
    return {"supported": True, "reason": None, **found.summary(), **rates}


def run_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of `run_facts`."""
    if not facts["supported"]:
        return [("runs here", f"no: {plain(facts['reason'])}")]
    needed, available = facts["weights_bytes"] + facts["kv_bytes"], facts["available_bytes"]
    state = "yes" if facts["fits"] else f"not in the memory: {size(needed)} needed, {size(available)} available"
    left = f" (and {size(facts['left_bytes'])} left in the file)" if facts["left_bytes"] else ""
    kv = f"{size(facts['kv_bytes'])} of keys and values for {facts['context']:,} tokens"
    rows = [
        ("runs here", f"{state}, on {facts['backend']}"),
        ("memory", f"{size(facts['weights_bytes'])} of weights{left}, {kv}"),
    ]
    rate, bandwidth = facts["decode_tokens_per_second"], facts["bandwidth_bytes_per_second"]
    if rate is not None:
        digits = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        read = f"{size(facts['decode_bytes'])} read per token at {bandwidth / 1e9:.1f} GB/s, measured"
        rows.append(("decode", f"about {digits} tokens/s after {facts['context']:,} tokens: {read}"))
    return rows
