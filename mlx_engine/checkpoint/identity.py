"""The identity of a checkpoint: a digest that names its files without reading all of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlx_engine.checkpoint.gguf import part_files
from mlx_engine.errors import SourceError

# Pieces that are read of each file, evenly spaced, and their size: 4 MiB in all.
PIECES, PIECE_BYTES = 256, 16 << 10


def identity(path: Path) -> str:
    """Return a SHA-256, in hex, of the names, sizes and some bytes of a checkpoint's files.

    Files of at most 4 MiB are read completely. Of larger ones, 256 pieces are read: weights of another training run,
    another quantisation or another size differ in them, a single edited weight may not.

    Raises:
        SourceError: a file cannot be read.
    """
    hashed = hashlib.sha256()
    files = [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else part_files(path)
    for file in files:
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, 2)
                # The name of a GGUF file is the user's choice.
                hashed.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
                step = max(PIECE_BYTES, size // PIECES)
                for at in range(0, size, step):
                    opened.seek(at)
                    hashed.update(opened.read(PIECE_BYTES))
        except OSError as error:
            raise SourceError(f"{file}: cannot be read ({error.strerror or error}); check the path") from error
    return hashed.hexdigest()
