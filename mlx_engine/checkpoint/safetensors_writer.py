"""Write a safetensors file piece by piece: no more of it is in memory than one piece of one tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.types import GGMLType

# The table is padded to so many bytes, so that what follows it is aligned.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: F32, F16 or BF16, of row-major shape."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.type.bytes_for(math.prod(self.shape))


def write_safetensors(path: Path, entries: Iterable[Entry], pieces: Iterable[NDArray[np.uint8]]) -> None:
    """Write the table of all entries, then their bytes: `pieces`, one after the other, are those of all tensors.

    Raises:
        ValueError: the pieces are more bytes than the entries call for, or fewer.
        OSError: the file cannot be written.
    """
    # Without it transformers takes the file for another framework's.
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
        raise ValueError(f"{path}: the table calls for {end:,} bytes, the pieces had {written:,}")
