"""The command `inspect`: show and verify the contents of a model file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import FAILED, notice, reports_errors
from mlx_engine.commands.tensor_list import print_tensors, tensor_lines
from mlx_engine.commands.values import (
    columns,
    exact,
    plain,
    print_json,
    shown,
    size,
)
from mlx_engine.errors import OptionError

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


@reports_errors
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="GGUF file, safetensors file, Hugging Face folder, hub id org/repo[:file], or builtin."),
    ] = "builtin",
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
    verify: Annotated[bool, typer.Option("--verify", help="Check that the model is complete and can be run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the header, metadata and tensors of a model without loading it."""
    from mlx_engine.checkpoint.listing import open_listing
    from mlx_engine.checkpoint.sources import resolve

    list_tensors = tensors or filter_ is not None or stats or head is not None
    if list_tensors + (meta is not None) + verify > 1:
        raise OptionError(option="inspect", expected="one of --tensors, --meta and --verify", found="several")
    path = resolve(model)
    if verify:
        raise typer.Exit(print_findings(path, as_json=json))
    listing = open_listing(path)
    if meta is not None:
        print_value(listing, meta, as_json=json)
    elif list_tensors:
        rows = listing.select(filter_)
        if not rows and listing.tensors:
            notice(f"{path}: none of the {len(listing.tensors):,} tensors matches {filter_!r}")
        print_tensors(listing, rows, stats=stats, head=head, as_json=json)
    else:
        print_all(listing, as_json=json)


def print_all(listing: Listing, *, as_json: bool) -> None:
    """Print header, model sizes, metadata, tensors, and totals by type."""
    from mlx_engine.checkpoint.summary import summary

    sizes, totals = summary(listing), listing.totals()
    if as_json:
        print_json(
            {
                "path": str(listing.path),
                "format": listing.format,
                "header": listing.header,
                "model": sizes,
                "metadata": listing.metadata,
                "tensors": [asdict(row) for row in listing.tensors],
                "totals": {name: asdict(total) for name, total in totals.items()},
            }
        )
        return
    print("\n".join(columns([*header_rows(listing), *size_rows(sizes)], "<<")))
    if listing.metadata:
        print(f"\nmetadata ({len(listing.metadata):,})")
        rows = [(f"  {plain(key)}", kind(listing, key), shown_of(listing, key)) for key in listing.metadata]
        print("\n".join(columns(rows, "<<<")))
    if totals:
        print(f"\ntensors ({len(listing.tensors):,})")
        print("\n".join(tensor_lines(listing.tensors, indent="  ")))
        print("\ntotals")
        cells = [
            (f"  {name}", f"{t.n_tensors:,} tensors", f"{t.n_elements:,} values", exact(t.nbytes), size(t.nbytes))
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
    """Print one metadata value in full: a string unchanged, an array with one element per line.

    Raises:
        FormatError: there is no such key.
    """
    value = listing.value(key)
    if as_json:
        print_json({"key": key, "type": kind(listing, key) or None, "value": value})
    elif isinstance(value, str):
        print(value)
    elif isinstance(value, list | tuple) or hasattr(value, "tolist"):
        for item in value if isinstance(value, list | tuple) else value.tolist():
            print(plain(item) if isinstance(item, str) else item)
    else:
        print_json(value) if isinstance(value, dict) else print(shown_of(listing, key))


def print_findings(path: Path, *, as_json: bool) -> int:
    """Print the outcome of every check and return the exit code."""
    from mlx_engine.convert.verify import Level
    from mlx_engine.convert.verify import verify as verified

    findings = verified(path)
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    code = FAILED if counts["FAIL"] else 0
    if as_json:
        rows = [{"level": f.level.value, "check": f.check, "detail": f.detail} for f in findings]
        print_json({"path": str(path), "ok": not code, "counts": counts, "findings": rows})
        return code
    colors = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}
    for finding in findings:
        level = typer.style(finding.level.value, fg=colors[finding.level.value])
        typer.echo(f"{level}  {finding.check:<10} {finding.detail}")
    print(f"{plain(str(path))}: {counts['PASS']} passed, {counts['WARN']} to note, {counts['FAIL']} failed")
    return code
