"""Compute digests of a checkpoint's files. `identity` is quick, and hashes some bytes; `digest` hashes all bytes.

Comparing digests shows whether two processes, or a process and a cache on disk, have the same model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlx_engine.checkpoint.gguf import part_files
from mlx_engine.errors import SourceError
from mlx_engine.kernels.files import draft

PIECES, PIECE_BYTES = 256, 16 << 10


def _weight_files(path: Path) -> list[Path]:
    """Return all parts of a model file, or a folder's safetensors files in order of their names."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else part_files(path)


def identity(path: Path) -> str:
    """Return a SHA-256, in hex, of the sizes and some bytes of a checkpoint's files.

    The files are the parts of a GGUF file, or a folder's weights and config.json. For a folder, the names of the files
    are hashed, too. Files of at most 4 MiB are read completely. Of larger files, 256 evenly spaced pieces of 16 KiB and
    up to 255 bytes at the end are read. So models that differ only in a few edited weights may have the same SHA-256.

    Raises:
        SourceError: a file cannot be read.
    """
    hashed = hashlib.sha256()
    for file in [*_weight_files(path), *([path / "config.json"] if path.is_dir() else [])]:
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, 2)
                # The name of a GGUF file is not hashed, because users rename these files.
                hashed.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
                step = max(PIECE_BYTES, size // PIECES)
                for at in range(0, size, step):
                    opened.seek(at)
                    hashed.update(opened.read(PIECE_BYTES))
        except OSError as error:
            raise SourceError(f"{file}: cannot be read ({error.strerror or error}); check the path") from error
    return hashed.hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256, in hex, of all bytes of a checkpoint's weight files."""
    total = hashlib.sha256()
    for file in _weight_files(path):
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                total.update(piece)
    return total.hexdigest()


def signature(path: Path) -> str:
    """Return a text with the paths, sizes, inodes and times of a checkpoint's weight files; "" if `stat` fails.

    The text changes with every write to a file, because a write updates the file's change time (ctime), and programs
    cannot set this time.
    """
    try:
        about = [(str(file.resolve()), file.stat()) for file in _weight_files(path)]
    except OSError:
        return ""
    return repr([(file, of.st_size, of.st_ino, of.st_mtime_ns, of.st_ctime_ns) for file, of in about])


def kept_digest(path: Path, folder: Path, loaded: str | None = None) -> str:
    """Return the `digest` of a checkpoint. Keep it in a file in `folder`, for later calls with unchanged files.

    `loaded` is the `signature` of the files when their weights were loaded. If it is None, changes of the files since
    they were loaded are not detected.

    Raises:
        SourceError: the files have changed since they were loaded, or while they were read.
        OSError: a file cannot be read, or the digest cannot be written to `folder`.
    """
    about = signature(path)
    changed = SourceError(f"the files of {path} have changed since they were loaded; load the model again")
    if loaded is not None and about != loaded:
        raise changed
    kept = folder / f"model-{hashlib.sha256(about.encode()).hexdigest()[:32]}.sha256"
    try:
        known = kept.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        known = ""
    if len(known) == 64 and set(known) <= set("0123456789abcdef"):
        return known
    found = digest(path)
    if not about or signature(path) != about:
        raise changed
    with draft(kept) as new:
        new.write_text(found, encoding="ascii")
        new.replace(kept)
    return found
