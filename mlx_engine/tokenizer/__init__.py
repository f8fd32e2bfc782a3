"""Text to token ids and back, from a GGUF file's metadata or a `tokenizer.json`; streams whole characters.

Conversations become ids through the model's own template (`chat`), which runs in a sandbox (`sandbox`). What is not
here: training; vocabularies other than byte-level BPE and SPM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mlx_engine.errors import SourceError
from mlx_engine.tokenizer.gguf import from_gguf
from mlx_engine.tokenizer.hf import from_json
from mlx_engine.tokenizer.stream import StreamDecoder
from mlx_engine.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "from_gguf", "from_json", "load_tokenizer"]


class HasMetadata(Protocol):
    """An open GGUF file, as far as a tokenizer is concerned."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Key to value."""


def load_tokenizer(source: str | os.PathLike[str] | HasMetadata) -> Tokenizer:
    """The tokenizer in a GGUF file (open, or its path), a `tokenizer.json`, or a folder that has one.

    Raises:
        SourceError: there is no such file.
        FormatError: a GGUF file is damaged, or a file is a Git-LFS pointer.
        TokenizerError: no tokenizer can be made of what is there.
    """
    if not isinstance(source, (str, os.PathLike)):
        return from_gguf(source.metadata, where=str(getattr(source, "path", "metadata")))
    path = Path(source)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise SourceError(f"{path}: expected a folder with a tokenizer.json, found none; name a file instead")
        return from_json(path / "tokenizer.json")
    if path.suffix == ".json":
        return from_json(path)
    from mlx_engine.checkpoint.gguf import open_gguf

    with open_gguf(path) as file:
        return from_gguf(file.metadata, where=str(path))
