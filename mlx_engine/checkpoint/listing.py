"""What a checkpoint's files say of themselves, whether or not a model can be built from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.checkpoint.safetensors import open_safetensors
from mlx_engine.errors import UnsupportedTypeError
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a listing.

    `type` is spelled as in the file; `nbytes` is None for a type of safetensors that cannot be read.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int | None

    @property
    def n_elements(self) -> int:
        """Values in all."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Listing:
    """The contents of a GGUF file, a Hugging Face folder or a single safetensors file.

    Attributes:
        path: the file or folder.
        format: "GGUF" or "safetensors".
        header: numbers about the file itself; a GGUF file has version, alignment and data_offset too.
        metadata: GGUF's, or config.json's, in the file's order.
        kinds: the type of each value of a GGUF file's metadata, as GGUF calls it; empty for others.
        tensors: in the file's order.
        weight: a tensor's stored bytes by name.
    """

    path: Path
    format: str
    header: Mapping[str, int]
    metadata: Mapping[str, object]
    kinds: Mapping[str, str]
    tensors: tuple[TensorRow, ...]
    weight: Callable[[str], Weight]


def open_listing(path: Path) -> Listing:
    """Read the headers of a checkpoint; no tensor is touched.

    Raises:
        SourceError: there is no such file or folder, or it cannot be read.
        FormatError: what is there is not what its format promises.
    """
    if path.is_dir():
        return _of_folder(path)
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_gguf(path)


def _of_gguf(path: Path) -> Listing:
    file = open_gguf(path)
    header = {
        "file_bytes": path.stat().st_size,
        "version": file.version,
        "n_metadata": len(file.metadata),
        "n_tensors": len(file.tensors),
        "alignment": file.alignment,
        "data_offset": file.data_offset,
    }
    kinds = {key: kind.name.lower() for key, kind in file.kinds.items()}
    rows = tuple(TensorRow(info.name, info.shape, info.type.name, info.nbytes) for info in file.tensors.values())
    return Listing(path, "GGUF", header, file.metadata, kinds, rows, file.weight)


def _of_safetensors(path: Path) -> Listing:
    file = open_safetensors(path)
    rows = tuple(TensorRow(name, t.shape, t.dtype, t.stop - t.start) for name, t in file.tensors.items())
    header = {"file_bytes": path.stat().st_size, "n_tensors": len(rows)}
    return Listing(path, "safetensors", header, {}, {}, rows, file.weight)


def _of_folder(folder: Path) -> Listing:
    checkpoint = open_checkpoint(folder)
    rows = tuple(_row(checkpoint, name) for name in checkpoint.shapes)
    header = {
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "n_metadata": len(checkpoint.settings),
        "n_tensors": len(rows),
    }
    return Listing(folder, "safetensors", header, checkpoint.settings, {}, rows, checkpoint.weight)


def _row(checkpoint: Checkpoint, name: str) -> TensorRow:
    try:
        weight = checkpoint.weight(name)
    except UnsupportedTypeError as error:
        return TensorRow(name, checkpoint.shapes[name], error.found, None)
    return TensorRow(name, weight.shape, weight.type.name, weight.nbytes)
