"""Write the results of a benchmark to a folder."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_engine.bench.tables import as_json
from mlx_engine.errors import SourceError


def write(path: Path, text: str) -> None:
    """Write a text file to an existing folder.

    Raises:
        SourceError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


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
        raise SourceError(f"{path}: expected a folder to write to, found {error.strerror or error}") from error


def save(folder: Path, stem: str, found: Sequence[dict[str, Any]], page: str) -> None:
    """Write all samples as JSON, and the page as Markdown.

    Raises:
        SourceError: a file cannot be written.
    """
    write(folder / f"{stem}.json", as_json(found) + "\n")
    write(folder / f"{stem}.md", page)
