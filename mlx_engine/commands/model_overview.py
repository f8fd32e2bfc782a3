"""Print an overview of a model file, or one of its metadata values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlx_engine.commands.console import safe_for
from mlx_engine.commands.outlook_rows import run_rows
from mlx_engine.commands.tensor_list import tensor_lines
from mlx_engine.commands.values import columns, exact, plain, print_json, shown
from mlx_engine.errors import size

if TYPE_CHECKING:
    from mlx_engine.checkpoint.listing import Listing

TITLES = {
    "n_parameters": "parameters",
    "n_layers": "layers",
    "hidden_size": "hidden size",
    "n_heads": "heads",
    "n_kv_heads": "key/value heads",
    "head_dim": "head width",
    "intermediate_size": "feed-forward size",
    "vocab_size": "vocabulary",
    "context_length": "context",
    "rope_theta": "rope theta",
    "norm_eps": "norm epsilon",
    "sliding_window": "sliding window",
}


def print_all(listing: Listing, run: Mapping[str, Any], *, as_json: bool) -> None:
    """Print header, model sizes, how it would run (`run_facts`), metadata, tensors, and totals by type."""
    from mlx_engine.checkpoint.listing import summary

    sizes, totals = summary(listing), listing.totals()
    if as_json:
        print_json(
            {
                "path": str(listing.path),
                "format": listing.format,
                "header": listing.header,
                "model": sizes,
                "run": run,
                "metadata": listing.metadata,
                "tensors": [asdict(row) for row in listing.tensors],
                "totals": {name: asdict(total) for name, total in totals.items()},
            }
        )
        return
    print("\n".join(columns([*header_rows(listing), *size_rows(sizes), *run_rows(run)], "<<")))
    if listing.metadata:
        print(f"\nmetadata ({len(listing.metadata):,})")
        rows = [(f"  {plain(key)}", kind(listing, key), shown_of(listing, key)) for key in listing.metadata]
        print("\n".join(columns(rows, "<<<")))
    if totals:
        print(f"\ntensors ({len(listing.tensors):,})")
        print("\n".join(tensor_lines(listing.tensors, indent="  ")))
        print("\ntotals")
        cells = [
            (
                f"  {plain(name)}",
                f"{t.n_tensors:,} tensors",
                f"{t.n_elements:,} values",
                exact(t.nbytes),
                size(t.nbytes),
            )
            for name, t in totals.items()
        ]
        print("\n".join(columns(cells, "<>>>>")))


def header_rows(listing: Listing) -> list[tuple[str, str]]:
    """Return the rows about the file."""
    header = listing.header
    version = f" version {header['version']}" if "version" in header else ""
    n_metadata, n_tensors = len(listing.metadata), len(listing.tensors)
    rows = [("file", plain(str(listing.path)))]
    rows.append(("format", f"{listing.format}{version}, {n_metadata:,} metadata values, {n_tensors:,} tensors"))
    rows.append(("size", f"{size(header['file_bytes'])} ({exact(header['file_bytes'])} bytes)"))
    if listing.format == "GGUF" and n_tensors:
        rows.append(("data", f"from byte {header['data_offset']:,}, aligned to {header['alignment']:,}"))
    return rows


def size_rows(sizes: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the rows about the model."""
    rows = []
    for name, value in sizes.items():
        text = f"{value:,}" if isinstance(value, int) else shown(value, "float32").strip("'")
        rows.append((TITLES.get(name, name), text))
    return rows


def kind(listing: Listing, key: str) -> str:
    """Return the type of a metadata value, as spelled in the file format."""
    return listing.kinds.get(key, "")


def shown_of(listing: Listing, key: str) -> str:
    """Format a metadata value on one line."""
    return shown(listing.metadata[key], kind(listing, key))


def print_value(listing: Listing, key: str, *, as_json: bool) -> None:
    """Print one metadata value in full: a string as it is (but see `safe_for`), an array with one element per line.

    Raises:
        FormatError: there is no such key.
    """
    value = listing.value(key)
    if as_json:
        print_json({"key": key, "type": kind(listing, key) or None, "value": value})
    elif isinstance(value, str):
        print(safe_for(sys.stdout, value))
    elif isinstance(value, list | tuple) or hasattr(value, "tolist"):
        for item in value if isinstance(value, list | tuple) else value.tolist():
            print(plain(item) if isinstance(item, str) else item)
    else:
        print_json(value) if isinstance(value, dict) else print(shown_of(listing, key))
