"""Checkpoints with the shapes of real models and random weights ("shape:gpt2"), to benchmark without a download.

Each is written once, to the user's cache folder, and stays there: Qwen3 and Qwen3.5 as a Q8_0 GGUF file, others as
Hugging Face folders. Their generated text is noise; their timings are valid, because speed does not depend on the
values.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mlx_engine.checkpoint.shape_folders import FolderShape, Progress, write_folder
from mlx_engine.checkpoint.shape_gemma3 import Gemma3Shape
from mlx_engine.checkpoint.shape_gpt2 import GPT2Shape
from mlx_engine.checkpoint.shape_qwen3 import Qwen3Shape, write_shape
from mlx_engine.checkpoint.shape_qwen3_5 import Qwen35Shape, write_qwen35_shape
from mlx_engine.checkpoint.shape_qwen3_moe import Qwen3MoeShape, write_moe_shape
from mlx_engine.checkpoint.sources import PREFIX
from mlx_engine.errors import SourceError, size
from mlx_engine.kernels.drafts import draft, remove_dead
from mlx_engine.observe import log

SHAPES: dict[str, Qwen3Shape | FolderShape] = {
    "qwen3-0.6b": Qwen3Shape(28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    # A twelfth of the layers and of the vocabulary, so that the layers' share of a token's work is that of the model.
    "qwen3-30b-a3b": Qwen3MoeShape(4, 2048, 6144, 32, 4, 128, 12_672, 40_960, 1e6, 128, 8, 768),
    "qwen3.5-0.8b": Qwen35Shape(24, 1024, 3584, 8, 2, 256, 248_320, 262_144, 1e7, 16, 128, 4),
    "gpt2": GPT2Shape(12, 768, 12, 50_257, 1024),
    "gemma3-1b": Gemma3Shape(26, 1152, 6912, 4, 1, 256, 262_144, 32_768, 512),
}


# Where shapes are written that are not kept; None keeps them.
_temporary: Path | None = None


def shape_path(name: str, progress: Progress | None = None) -> Path:
    """Return the path of the checkpoint of this shape. If it does not exist, write it first, and print where it is.

    For a folder, `progress` is called with (pieces written, total pieces).

    Raises:
        SourceError: there is no such shape, or the cache folder cannot be written.
    """
    if name not in SHAPES:
        raise SourceError(f"{PREFIX}{name}: expected one of {', '.join(SHAPES)}, found none of this name")
    path = file_of(name)
    remove_dead(path.parent)
    if not path.exists() and _temporary is not None:
        path = _temporary / path.name
    if path.exists():
        return path
    _make_folder(path.parent)
    _write(path, name, progress)
    if _temporary is None:
        files = [path] if path.is_file() else list(path.iterdir())
        nbytes = size(sum(file.stat().st_size for file in files))
        log.note(
            f"{PREFIX}{name}: {nbytes} of random weights are kept in {path} for later runs; "
            f"`mlx-engine cache remove {PREFIX}{name}` removes them, --no-cache keeps none"
        )
    return path


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Write shapes to a temporary folder meanwhile, in the cache folder; those that are in the cache are read there.

    If this process is killed, the next one that uses a shape removes the folder.

    Raises:
        SourceError: the folder cannot be made.
    """
    global _temporary
    _make_folder(cache_folder())
    with draft(cache_folder() / "shapes", is_folder=True) as folder:
        _temporary = folder
        try:
            yield
        finally:
            _temporary = None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be made ({error.strerror}); set XDG_CACHE_HOME") from error


def _write(path: Path, name: str, progress: Progress | None) -> None:
    shape = SHAPES[name]
    if isinstance(shape, Qwen3MoeShape):
        write_moe_shape(path, name, shape)
    elif isinstance(shape, Qwen35Shape):
        write_qwen35_shape(path, name, shape)
    elif isinstance(shape, Qwen3Shape):
        write_shape(path, name, shape)
    else:
        write_folder(path, shape, progress)


def file_of(name: str) -> Path:
    """Return the path of the checkpoint of a shape, a key of `SHAPES`; it may not exist yet."""
    shape = SHAPES[name]
    suffix = "q8_0.gguf" if isinstance(shape, Qwen3Shape) else shape.type.name.lower()
    return cache_folder() / f"{name}-{suffix}"


def cache_folder() -> Path:
    """Return the folder for files that can be regenerated: XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    return Path(cache) / "mlx_engine"
