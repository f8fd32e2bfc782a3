"""Write a Hugging Face folder with random weights: config.json, safetensors and tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.checkpoint.safetensors_writer import Entry, write_safetensors
from mlx_engine.checkpoint.shape_vocabulary import tokenizer_json
from mlx_engine.errors import SourceError
from mlx_engine.kernels.drafts import draft
from mlx_engine.quant.types import GGMLType

# Values drawn and written at a time.
PIECE = 1 << 20

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Random:
    """A tensor of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


class FolderShape(Protocol):
    """The shape of a model whose checkpoint is a folder."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def type(self) -> GGMLType:
        """The type of all tensors."""

    def config(self) -> dict[str, Any]:
        """Return config.json."""

    def tensors(self) -> Iterator[Random]:
        """Yield the tensors, in the order of the file."""


def write_folder(folder: Path, shape: FolderShape, progress: Progress | None = None) -> None:
    """Write a checkpoint of this shape. The folder appears only when it is complete.

    `progress` is called with (pieces written, total pieces).

    Raises:
        SourceError: the folder cannot be written.
    """
    try:
        with draft(folder, is_folder=True) as path:
            tensors = list(shape.tensors())
            entries = [Entry(tensor.name, tensor.shape, shape.type) for tensor in tensors]
            (path / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
            (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(shape.vocab_size)))
            write_safetensors(path / "model.safetensors", entries, _pieces(tensors, shape.type, progress))
            # Another process may have written the same folder in the meantime.
            if not folder.exists():
                path.rename(folder)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be written ({error.strerror}); check folder and space") from error


def _pieces(tensors: Sequence[Random], type_: GGMLType, progress: Progress | None) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    sizes = [(tensor, min(PIECE, left)) for tensor in tensors for left in range(math.prod(tensor.shape), 0, -PIECE)]
    for done, (tensor, size) in enumerate(sizes, 1):
        values = rng.standard_normal(size, dtype=np.float32)
        yield quant.quantize(values * np.float32(tensor.std) + np.float32(tensor.mean), type_)
        if progress is not None:
            progress(done, len(sizes))
