"""Resolve a model source to a path: the built-in model, a path, a hub id, or a shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mlx_engine.errors import SourceError

ASSETS = Path(__file__).parent.parent / "assets"
BUILTIN = ASSETS / "storyteller-q8_0.gguf"

PREFIX = "shape:"

# org/repo, optionally :file, in the characters that hub names may have.
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+))?")


def resolve(source: str | Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of `source`: "builtin", "shape:NAME", "org/repo[:file]" or a path. A `Path` is always a path.

    `progress` is called with (done, total) while a shape is written for the first time.

    Raises:
        SourceError: nothing of this name exists, or it cannot be downloaded.
    """
    if source == "builtin":
        return BUILTIN
    if isinstance(source, str) and source.startswith(PREFIX):
        from mlx_engine.checkpoint.shapes import shape_path

        return shape_path(source.removeprefix(PREFIX), progress)
    if not str(source):
        raise SourceError("expected a file, a folder, 'builtin' or a hub id org/repo[:file], found an empty name")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
        # A name that is too long, a user who does not exist, a NUL.
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{str(source)[:80]!r}: expected a path or a hub id, found {error}") from error
    hub_id = None if isinstance(source, Path) else HUB_ID.fullmatch(source)
    # "models/qwen3.gguf" has the form of a hub id, but means a file.
    if hub_id is None or (path.suffix in (".gguf", ".safetensors") and not hub_id["file"]) or path.parent.is_dir():
        expected = "a file, a folder, 'builtin' or a hub id org/repo[:file]"
        raise SourceError(f"{source}: expected {expected}, found nothing at this path; check the path")
    from mlx_engine.checkpoint.hub import download

    return download(hub_id["repo"], hub_id["file"])


def is_cached(source: str) -> bool | None:
    """Whether what a hub id names is here already; None where `source` names something else."""
    hub_id = HUB_ID.fullmatch(source)
    try:
        if hub_id is None or Path(source).expanduser().exists():
            return None
    except (OSError, RuntimeError):
        return None
    from mlx_engine.checkpoint import hub

    return hub.is_cached(hub_id["repo"], hub_id["file"])
