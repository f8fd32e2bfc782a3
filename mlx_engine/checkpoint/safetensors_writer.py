"""Write safetensors files piece by piece: only one piece of one tensor is in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.types import GGMLType

# The header is padded to a multiple of this, so that tensor data is aligned.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to write: F32, F16 or BF16, with row-major shape."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.type.bytes_for(math.prod(self.shape))


def write_safetensors(path: Path, entries: Iterable[Entry], pieces: Iterable[NDArray[np.uint8]]) -> None:
    """Write the header, then tensor data: `pieces`, concatenated, are the bytes of all entries in their order.

    Raises:
        ValueError: the pieces have more or fewer bytes than the entries.
        OSError: the file cannot be written.
    """
    # transformers rejects a file without this entry as one of another framework.
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        table[entry.name] = {"dtype": entry.type.name, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        written = sum(stream.write(piece.data) for piece in pieces)
    if written != end:
        raise ValueError(f"{path}: the header has {end:,} bytes of tensors, the pieces had {written:,}")
