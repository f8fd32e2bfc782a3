"""Format results as llama-bench does: a Markdown table, CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from mlx_engine.backends import EXACT

Row = dict[str, Any]

# Columns that are left out if all rows have the default value.
OPTIONAL = {
    "kv": "on",
    "quant": "keep",
    "threads": "-",
    "activations": EXACT,
    "kv type": "f32",
    "jit": "on",
    "overlap": "on",
}


def markdown(rows: Sequence[Row]) -> str:
    """Return a table with a row per cell: mean ± standard deviation, `~` for an estimate, or why it did not run."""
    cells = [_cells(row) for row in rows]
    shown = [name for name in cells[0] if any(c[name] != OPTIONAL.get(name) for c in cells)]
    return aligned([shown, *([c[name] for name in shown] for c in cells)])


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Format rows, the head first, as an aligned Markdown table that is readable in a terminal."""
    widths = [max(2, *(len(line[i]) for line in table)) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in table]
    lines.insert(1, "| " + " | ".join("-" * (w - 1) + ":" for w in widths) + " |")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Escape a name from a file for a table cell."""
    return "".join(c if c.isprintable() and c != "|" else "?" for c in text)


def _cells(row: Row) -> dict[str, str]:
    return {
        "model": printable(row["model_name"]),
        "size": f"{row['model_size'] / 2**20:.2f} MiB",
        "params": f"{row['model_n_params'] / 1e6:.2f} M",
        "backend": row["backend"],
        "threads": "-" if row["threads"] is None else str(row["threads"]),
        "kv": "on" if row["kv"] else "off",
        "quant": row["quant"],
        "activations": row.get("activations", EXACT),
        "kv type": row.get("kv_type", "f32"),
        "jit": "on" if row.get("jit", True) else "off",
        "overlap": "on" if row.get("overlap", True) else "off",
        "test": row["test"],
        "t/s": _rate(row),
    }


def _rate(row: Row) -> str:
    if row.get("unavailable"):
        return f"unavailable: {row['unavailable']}"
    mark = "~" if row["estimated"] else ""
    digits = 2 if row["avg_ts"] >= 1 else 4
    unusable = " (not usable)" if row.get("usable") is False else ""
    return f"{mark}{row['avg_ts']:.{digits}f} ± {row['stddev_ts']:.{digits}f}{unusable}"


def as_csv(rows: Sequence[Row]) -> str:
    """Return CSV with a line per cell, without samples."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


def as_json(rows: Sequence[Row]) -> str:
    """Return a JSON list of objects, with all samples."""
    return json.dumps(list(rows), indent=1)


def as_jsonl(rows: Sequence[Row]) -> str:
    """Return a JSON object per line, with all samples."""
    return "\n".join(json.dumps(row) for row in rows)


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": markdown,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
}


def milliseconds(value: float) -> str:
    """Format a time in milliseconds: three decimals below 100, else one."""
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def figure(value: float) -> str:
    """Format a number with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
