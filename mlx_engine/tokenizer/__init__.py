"""Tokenizers from GGUF metadata or a `tokenizer.json`: encode, decode, and streaming decode by whole characters.

`chat.py` encodes chat messages with the model's chat template. `bpe.py` implements byte-level BPE, SPM and the BPE of
Gemma 4. Tokenizers cannot be trained.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.tokenizer.gguf import from_gguf
from mlx_engine.tokenizer.hf import from_json, tokenizer_json
from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import StreamDecoder

if TYPE_CHECKING:
    from mlx_engine.checkpoint.gguf import GGUFFile

__all__ = ["StreamDecoder", "Tokenizer", "from_gguf", "from_json", "load_tokenizer"]


def load_tokenizer(source: str | os.PathLike[str] | GGUFFile) -> Tokenizer:
    """Load the tokenizer of a GGUF file (open, or its path), a `tokenizer.json`, or a folder with a `tokenizer.json`.

    Raises:
        SourceError: the file cannot be read, or the folder has no `tokenizer.json`.
        FormatError: a GGUF or configuration file is damaged, a file is too large, or a file is a Git-LFS pointer.
        TokenizerError: the file has no tokenizer, or an unsupported one.
        ChatTemplateError: the chat template is too large.
    """
    if not isinstance(source, (str, os.PathLike)):
        return from_gguf(source.metadata, where=str(getattr(source, "path", "metadata")))
    path = Path(source)
    if path.is_dir():
        return from_json(tokenizer_json(path))
    if path.suffix == ".json":
        return from_json(path)
    from mlx_engine.checkpoint.gguf import open_gguf

    with open_gguf(path) as file:
        return from_gguf(file.metadata, where=str(path))
