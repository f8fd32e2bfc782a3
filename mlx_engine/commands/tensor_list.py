"""The tensor list of `inspect`: one line per tensor, with optional statistics and first values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlx_engine.commands.console import progress_bar
from mlx_engine.commands.values import columns, exact, plain, print_json
from mlx_engine.errors import UnsupportedTypeError, size

if TYPE_CHECKING:
    from mlx_engine.checkpoint.listing import Listing, TensorRow


def print_tensors(listing: Listing, rows: Sequence[TensorRow], *, stats: bool, head: int | None, as_json: bool) -> None:
    """Print the list of tensors, with statistics and first values if requested."""
    values: list[dict[str, Any]] = [{} for _ in rows]
    if stats or head is not None:
        with progress_bar("reading tensors") as progress:
            for done, row in enumerate(rows):
                progress(done, len(rows))
                values[done] = tensor_values(listing, row, stats=stats, head=head)
    if as_json:
        found = [{**asdict(row), **extra} for row, extra in zip(rows, values, strict=True)]
        print_json({"path": str(listing.path), "tensors": found})
        return
    for line, extra in zip(tensor_lines(rows), values, strict=True):
        print(line)
        if "error" in extra:
            print(f"    {plain(extra['error'])}")
        if "stats" in extra:
            known = ((name, value) for name, value in extra["stats"].items() if name != "n_not_finite" or value)
            print("    " + "  ".join(f"{name} {number(value)}" for name, value in known))
        if "head" in extra:
            print(f"    [{', '.join(map(number, extra['head']))}]")


def tensor_values(listing: Listing, row: TensorRow, *, stats: bool, head: int | None) -> dict[str, Any]:
    """Return a tensor's `stats` and `head` if requested, or `error` if its values cannot be read."""
    from mlx_engine.quant.statistics import first_values, statistics

    found: dict[str, Any] = {}
    try:
        if stats:
            found["stats"] = asdict(statistics(listing.weight(row.name)))
        if head is not None:
            found["head"] = first_values(listing.weight(row.name), head).tolist()
    except UnsupportedTypeError as error:
        return {"error": str(error)}
    return found


def number(value: float | None) -> str:
    """Format a count, a statistic or a weight, with the digits of a float32."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.7g}"


def tensor_lines(rows: Sequence[TensorRow], indent: str = "") -> list[str]:
    """Format name, shape, type and bytes in aligned columns."""
    cells = []
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        cells.append((indent + plain(row.name), shape, plain(row.type), exact(row.nbytes), size(row.nbytes)))
    return columns(cells, "<<<>>")
