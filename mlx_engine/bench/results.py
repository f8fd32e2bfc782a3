"""Write the results of a benchmark to a folder, and read files of earlier ones."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_engine.backends import EXACT
from mlx_engine.bench.tables import as_json
from mlx_engine.errors import FormatError, SourceError, is_number


def write(path: Path, text: str) -> None:
    """Write a text file to an existing folder.

    Raises:
        SourceError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def content(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        SourceError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


def default_folder(model: str) -> Path:
    """Return `bench-results/MODEL-TIME`, in characters valid on every system."""
    name = re.sub(r"[^\w.-]+", "-", Path(model).stem if Path(model).exists() else model).strip("-.")
    return Path("bench-results") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def make_folder(path: Path) -> None:
    """Create the folder. Called before measuring, so that a wrong path does not waste a run.

    Raises:
        SourceError: the folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{path}: the folder cannot be made ({error.strerror or error})") from error


def save(folder: Path, stem: str, found: Sequence[dict[str, Any]], page: str) -> None:
    """Write all samples as JSON, and the page as Markdown.

    Raises:
        SourceError: a file cannot be written.
    """
    write(folder / f"{stem}.json", as_json(found) + "\n")
    write(folder / f"{stem}.md", page)


Row = dict[str, Any]
Key = tuple[Any, ...]

KEY = ("model_name", "backend", "activations", "kv_type", "jit", "overlap", "kv", "quant", "test")
# Defaults for rows that were written before these fields existed.
DEFAULT = {"activations": EXACT, "kv_type": "f32", "jit": True, "overlap": True}
# The fields that a row must have, and their types.
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
    """Read the rows of a JSON or JSON lines file of `bench`: the last row of each cell that has a rate.

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
