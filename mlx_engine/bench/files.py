"""The folder that a benchmark's results are written to."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_engine.bench.tables import as_json
from mlx_engine.errors import SourceError


def write(path: Path, text: str) -> None:
    """A file of a folder that is there.

    Raises:
        SourceError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def default_folder(model: str) -> Path:
    """`bench-results/MODEL-TIME`, of characters that every system takes."""
    name = re.sub(r"[^\w.-]+", "-", Path(model).stem if Path(model).exists() else model).strip("-.")
    return Path("bench-results") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def make_folder(path: Path) -> None:
    """Before anything is measured for nothing.

    Raises:
        SourceError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{path}: expected a folder to write to, found {error.strerror or error}") from error


def save(folder: Path, stem: str, found: Sequence[dict[str, Any]], page: str) -> None:
    """Every sample as JSON, and the page beside it.

    Raises:
        SourceError: they cannot be written.
    """
    write(folder / f"{stem}.json", as_json(found) + "\n")
    write(folder / f"{stem}.md", page)
