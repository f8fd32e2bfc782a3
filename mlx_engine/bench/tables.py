"""Format results as llama-bench does: a Markdown table, CSV, JSON or JSON lines. Write and read files of results."""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_engine.backends import EXACT
from mlx_engine.errors import FormatError, SourceError, is_number

Row = dict[str, Any]

# Maps each optional column to its default; the column is left out if all rows have the default.
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
    """Return a table with a line per row.

    The last column has the rate (mean ± standard deviation, with ~ if estimated), or "unavailable" and the reason.
    """
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
    """Replace `|` and unprintable characters with `?`, so that a name from a file cannot break a Markdown table."""
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
    """Return CSV with a line per row, without samples and other nested fields."""
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
    """Format a number without decimals from 100 on, with one decimal from 10 on, and with two below 10."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def write(path: Path, text: str) -> None:
    """Write a text file to an existing folder; raise SourceError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def content(path: Path) -> bytes:
    """Return the bytes of a file; raise SourceError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


def default_folder(model: str) -> Path:
    """Return `bench-results/MODEL-TIME`, in characters valid on every system."""
    name = re.sub(r"[^\w.-]+", "-", Path(model).stem if Path(model).exists() else model).strip("-.")
    return Path("bench-results") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def make_folder(path: Path) -> None:
    """Create the folder, or raise SourceError. Call this before measuring, so that a wrong path wastes no run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{path}: the folder cannot be made ({error.strerror or error})") from error


def save(folder: Path, stem: str, found: Sequence[dict[str, Any]], page: str) -> None:
    """Write the rows as JSON, with all samples, and the page as Markdown; raise SourceError if this is impossible."""
    write(folder / f"{stem}.json", as_json(found) + "\n")
    write(folder / f"{stem}.md", page)


Key = tuple[Any, ...]

# The fields that identify a row. A row is one test of one model on one backend with its settings.
KEY = ("model_name", "backend", "activations", "kv_type", "jit", "overlap", "kv", "quant", "test")
# Maps each field that rows of older versions lack to its default.
DEFAULT = {"activations": EXACT, "kv_type": "f32", "jit": True, "overlap": True}
# Maps each field that `read` checks to its type. A row must have all of these fields, except those in `DEFAULT`.
NEEDED = {
    "model_name": str,
    "backend": str,
    "activations": str,
    "kv_type": str,
    "jit": bool,
    "overlap": bool,
    "kv": bool,
    "quant": str,
    "test": str,
    "n_prompt": int,
    "n_gen": int,
}


def read(path: Path) -> dict[Key, Row]:
    """Read a JSON or JSON lines file of `bench`; map each key (the values of `KEY`) to its last row with a rate.

    Raises:
        SourceError: the file cannot be read.
        FormatError: the file is not a result of `bench`.
    """
    found: dict[Key, Row] = {}
    for i, row in enumerate(_parsed(content(path), path)):
        wrong = _wrong(row)
        if wrong is not None:
            raise _error(path, f"{wrong} in row {i + 1}")
        if not row.get("unavailable"):
            found[tuple(row.get(name, DEFAULT.get(name)) for name in KEY)] = row
    if not found:
        raise _error(path, "no row with a rate")
    return found


def _parsed(raw: bytes, path: Path) -> list[Any]:
    try:
        text = raw.decode("utf-8")
        try:
            rows = json.loads(text)
        except json.JSONDecodeError:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise _error(path, f"invalid JSON: {error}") from error
    if not isinstance(rows, list):
        raise _error(path, type(rows).__name__)
    return rows


def _wrong(row: Any) -> str | None:
    """Return a description of the first invalid field of a row, or None."""
    if not isinstance(row, dict):
        return type(row).__name__
    for name, kind in NEEDED.items():
        if not isinstance(row.get(name, DEFAULT.get(name)), kind):
            return f"{name} = {row.get(name)!r}"[:80]
    samples = row.get("samples_s")
    sound = isinstance(samples, list) and samples and all(is_number(s) and s > 0 for s in samples)
    return None if sound or row.get("unavailable") else f"samples_s = {samples!r}"[:80]


def _error(path: Path, found: str) -> FormatError:
    hint = "name a file that `bench --out` or `-o json` wrote"
    return FormatError(where=str(path), expected="a list of measurements", found=found, hint=hint)
