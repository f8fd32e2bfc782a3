"""Read files of measurements that `bench` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_engine.errors import FormatError, SourceError, is_number

Row = dict[str, Any]
Key = tuple[Any, ...]

KEY = ("model_name", "backend", "jit", "overlap", "kv", "quant", "test")
# Defaults for rows that were written before these fields existed.
DEFAULT = {"jit": True, "overlap": True}
# The fields that a row must have, and their types.
NEEDED = {
    "model_name": str,
    "backend": str,
    "jit": bool,
    "overlap": bool,
    "kv": bool,
    "quant": str,
    "test": str,
    "n_prompt": int,
    "n_gen": int,
}


def read(path: Path) -> dict[Key, Row]:
    """Read the rows of a JSON or JSON lines file of `bench`: the last row of each cell that has a rate.

    Raises:
        SourceError: the file cannot be read.
        FormatError: the file is not a result of `bench`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: expected a readable file, found {error.strerror or error}") from error
    found: dict[Key, Row] = {}
    for i, row in enumerate(_parsed(raw, path)):
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
