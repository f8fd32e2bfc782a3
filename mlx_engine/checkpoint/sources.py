"""Resolve a model source to a path: the built-in model, a path, a hub id, or a shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_engine.checkpoint.hub_names import hub_name
from mlx_engine.errors import SourceError

ASSETS = Path(__file__).parent.parent / "assets"
BUILTIN = ASSETS / "storyteller-q8_0.gguf"

PREFIX = "shape:"
KINDS = "a file, a folder, 'builtin' or a hub id org/repo[:file]"


def resolve(source: str | Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of `source`: "builtin", "shape:NAME", a path, or a hub id or address as `hub_names` has them.

    A `Path` is always a path. `progress` is called with (done, total) while a shape is written for the first time.

    Raises:
        SourceError: nothing of this name exists, or it cannot be downloaded.
    """
    if source == "builtin":
        return BUILTIN
    if isinstance(source, str) and source.startswith(PREFIX):
        from mlx_engine.checkpoint.shapes import shape_path

        return shape_path(source.removeprefix(PREFIX), progress)
    if not str(source):
        raise SourceError(f"the name of the model is empty; give {KINDS}")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
        # The name is too long, has the home of an unknown user, or has a NUL.
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{str(source)[:80]!r}: neither a path nor a hub id ({error})") from error
    name = None if isinstance(source, Path) else hub_name(source)
    # "models/qwen3.gguf" has the form of a hub id, but means a file.
    is_file = name is not None and source == name.repo and path.suffix in (".gguf", ".safetensors")
    if name is None or is_file or path.parent.is_dir():
        raise SourceError(f"{source}: no such file or folder; give {KINDS}")
    from mlx_engine.checkpoint.hub import download

    return download(*name)


def is_cached(source: str) -> bool | None:
    """Return whether the model of a hub id is in the cache; None if `source` is not a hub id."""
    try:
        if Path(source).expanduser().exists():
            return None
        name = hub_name(source)
    except (OSError, RuntimeError, ValueError):  # as in `resolve`; a SourceError is an OSError
        return None
    if name is None:
        return None
    from mlx_engine.checkpoint import hub

    return hub.is_cached(*name)
