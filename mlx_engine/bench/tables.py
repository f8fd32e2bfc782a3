"""Results as llama-bench prints them: a Markdown table for people, CSV, JSON and JSON lines for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

# Columns that are left out where all rows agree and the value is the default.
OPTIONAL = {"kv": "on", "quant": "keep", "threads": "-", "jit": "on", "overlap": "on"}


def markdown(rows: Sequence[Row]) -> str:
    """One row per cell; `t/s` is mean ± standard deviation, `~` marks what was estimated, a reason what cannot run."""
    cells = [_cells(row) for row in rows]
    shown = [name for name in cells[0] if any(c[name] != OPTIONAL.get(name) for c in cells)]
    return aligned([shown, *([c[name] for name in shown] for c in cells)])


def aligned(table: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first, that is a table in a terminal too."""
    widths = [max(2, *(len(line[i]) for line in table)) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in table]
    lines.insert(1, "| " + " | ".join("-" * (w - 1) + ":" for w in widths) + " |")
    return "\n".join(lines)


def printable(text: str) -> str:
    """A name that comes out of a file, fit for a cell of a table."""
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
    return f"{mark}{row['avg_ts']:.{digits}f} ± {row['stddev_ts']:.{digits}f}"


def as_csv(rows: Sequence[Row]) -> str:
    """One line per cell; samples are left to JSON."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


def as_json(rows: Sequence[Row]) -> str:
    """A list of objects, with every sample."""
    return json.dumps(list(rows), indent=1)


def as_jsonl(rows: Sequence[Row]) -> str:
    """An object per line, with every sample."""
    return "\n".join(json.dumps(row) for row in rows)


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": markdown,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
}
