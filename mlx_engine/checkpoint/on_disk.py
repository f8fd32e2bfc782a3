"""The engine's files on disk that can be deleted: hub models, generated random-weight models, compiled kernels."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_engine.checkpoint import shapes
from mlx_engine.checkpoint.sources import PREFIX
from mlx_engine.errors import SourceError
from mlx_engine.kernels.files import ENDING, cache_folder, remove_dead

HUB_PREFIX = "models--"
# Folders of compiled kernels are named by a digest of their source. NUMBA_CACHE_DIR may have other folders, too.
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Kept:
    """Something on disk.

    Attributes:
        name: the name for the user: a hub id, shape:NAME, kernels, emulator or tuning.
        kind: how it comes back after deletion: "download" by a download; "made" if it is made again when it is needed.
        path: the file or folder.
        parts: the paths that `remove` deletes: the path itself, or the engine's files in it.
        nbytes: total bytes, not following links.
    """

    name: str
    kind: Literal["download", "made"]
    path: Path
    parts: tuple[Path, ...]
    nbytes: int


def kept() -> list[Kept]:
    """Return what is on disk, models first. The hub's folder is shared with other programs that use the hub."""
    remove_dead(shapes.cache_folder())
    return [*_downloads(), *_shapes(), *_kernels()]


def remove(item: Kept) -> None:
    """Remove an item from disk. A process that has its files open can still read them.

    Raises:
        SourceError: a part cannot be removed.
    """
    for part in item.parts:
        try:
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise SourceError(
                f"{error.filename or part}: cannot be removed ({error.strerror or error}); check its permissions"
            ) from error


def _downloads() -> Iterator[Kept]:
    from huggingface_hub import constants

    for folder in _folders(Path(constants.HF_HUB_CACHE)):
        if folder.name.startswith(HUB_PREFIX):
            name = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
            yield Kept(name, "download", folder, (folder,), size_of(folder))


def _shapes() -> Iterator[Kept]:
    for name in shapes.SHAPES:
        path = shapes.file_of(name)
        if path.exists():
            yield Kept(f"{PREFIX}{name}", "made", path, (path,), size_of(path))


def _kernels() -> Iterator[Kept]:
    compiled = cache_folder("kernels", given=os.environ.get("NUMBA_CACHE_DIR"))
    emulator = cache_folder("emulator")
    remove_dead(emulator)
    found = {
        "kernels": (compiled, [folder for folder in _folders(compiled) if _DIGEST.fullmatch(folder.name)]),
        # remove_dead has deleted abandoned drafts; other drafts are in use.
        "emulator": (emulator, sorted(path for path in emulator.iterdir() if not path.name.endswith(ENDING))),
        "tuning": (tuning := shapes.cache_folder() / "tuning.json", [tuning] if tuning.is_file() else []),
    }
    for name, (path, parts) in found.items():
        if parts:
            yield Kept(name, "made", path, tuple(parts), sum(map(size_of, parts)))


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; links do not count."""
    files = [path] if not path.is_dir() else [Path(root, name) for root, _, names in os.walk(path) for name in names]
    sizes = 0
    for file in files:
        try:
            status = file.lstat()
        except OSError:  # removed meanwhile
            continue
        sizes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return sizes
