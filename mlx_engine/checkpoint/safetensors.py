"""Read and write safetensors files: the header's length in 8 bytes, a JSON header, then tensor data.

Files are memory-mapped. They are not trusted: every length is checked before it is used.

Source: github.com/huggingface/safetensors, "Format" in its README, release 0.5.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.paths import POINTER_BYTES, refuse_other_paths, refuse_pointer
from mlx_engine.errors import FormatError, SourceError, UnsupportedTypeError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

# The types that `SafetensorsFile.weight` can load; they have the same names in GGUF.
READABLE = ("F32", "F16", "BF16")
# Maps each type in a file to the NumPy type that `SafetensorsFile.array` returns. NumPy has no BF16 and no 8-bit
# floats, so these are returned as unsigned integers with the same bits.
ARRAYS = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1", "I8": "i1", "U8": "u1", "I32": "<i4",
    "U32": "<u4", "I64": "<i8",
}  # fmt: skip
DAMAGED = "the file is damaged or was cut short; download it again"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header: type as spelled in the file, row-major shape, bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """An open safetensors file; `tensors` maps each tensor's name to its entry in the header."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, tensors: dict[str, TensorEntry]) -> None:
        self.path, self.tensors, self._data = path, tensors, data

    def weight(self, name: str) -> Weight:
        """Return a tensor as a view of the mapped file; raise UnsupportedTypeError if its type is not in `READABLE`."""
        entry = self.tensors[name]
        if entry.dtype not in READABLE:
            raise UnsupportedTypeError(
                where=f"{self.path}: {name}",
                expected=f"one of the types {', '.join(READABLE)}",
                found=entry.dtype,
                hint="convert the checkpoint to one of these types",
            )
        return Weight(name=name, shape=entry.shape, type=BY_NAME[entry.dtype], data=self.stored_bytes(name))

    def stored_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor of any type, as a read-only view of the mapped file."""
        entry = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, entry.stop - entry.start, entry.start)

    def array(self, name: str, *dtypes: str) -> NDArray[Any]:
        """Return a tensor as a view of the mapped file, with the NumPy type from `ARRAYS`.

        Raises:
            FormatError: the stored type is not among `dtypes`.
        """
        entry = self.tensors[name]
        if entry.dtype not in dtypes:
            raise FormatError(
                where=f"{self.path}: {name}",
                expected=f"the type {' or '.join(dtypes)}",
                found=entry.dtype,
                hint="the folder is damaged, or its quantisation is not implemented; choose another conversion",
            )
        count = math.prod(entry.shape)
        return np.frombuffer(self._data, ARRAYS[entry.dtype], count, entry.start).reshape(entry.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Memory-map a file and parse its header; no tensor data is read.

    Raises:
        SourceError: the file cannot be opened.
        FormatError: the file is not valid safetensors.
    """
    try:
        refuse_other_paths(path, "a safetensors file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # An empty file cannot be mapped.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"{str(path)!r}: cannot be read ({error})") from error
    return SafetensorsFile(path, data, _table(path, data))


def _table(path: Path, data: mmap.mmap | bytes) -> dict[str, TensorEntry]:
    refuse_pointer(path, data[:POINTER_BYTES], "a safetensors file")
    if len(data) < 8:
        raise _damaged(path, "8 bytes of header length", f"{len(data)} bytes in all")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise _damaged(path, f"a header of at most {len(data) - 8:,} bytes", f"a length of {length:,}")
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a JSON header", str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "a JSON object", type(header).__name__)
    header.pop("__metadata__", None)
    table = {name: _entry(path, name, row, 8 + length, len(data)) for name, row in header.items()}
    _check_order(path, table, 8 + length, len(data))
    return table


def _check_order(path: Path, table: dict[str, TensorEntry], start: int, size: int) -> None:
    """Raise FormatError if tensors overlap, or do not fill the file from byte `start` to its end, `size`."""
    end, before = start, "the header"
    for name, entry in sorted(table.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "an overlap" if entry.start < end else f"a hole of {entry.start - end:,} bytes"
            expected = f"tensor {name!r} to begin at byte {end:,}, where {before} ends"
            raise _damaged(path, expected, f"byte {entry.start:,}, {what}")
        end, before = entry.stop, f"tensor {name!r}"
    if end != size:
        raise _damaged(path, f"the file to end at byte {end:,}, where {before} ends", f"{size:,} bytes")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key that appears twice")
    return table


def _entry(path: Path, name: str, row: object, base: int, size: int) -> TensorEntry:
    where = f"tensor {name!r}"
    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        raise _damaged(path, f"{where} with dtype, shape and data_offsets", repr(row)[:80])
    shape, offsets = _sizes(row.get("shape")), _sizes(row.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"{where} with whole numbers as shape and two data_offsets", repr(row)[:80])
    start, stop = base + offsets[0], base + offsets[1]
    if not start <= stop <= size:
        raise _damaged(path, f"{where} inside the file's {size:,} bytes", f"bytes {start:,} to {stop:,}")
    entry = TensorEntry(row["dtype"], shape, start, stop)
    if entry.dtype in ARRAYS and np.dtype(ARRAYS[entry.dtype]).itemsize * math.prod(shape) != stop - start:
        raise _damaged(path, f"{where} to have the length of shape {shape} in {entry.dtype}", f"{stop - start:,} bytes")
    return entry


def _sizes(value: object) -> tuple[int, ...] | None:
    whole = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
    return tuple(value) if isinstance(value, list) and whole else None


def _damaged(path: Path, expected: str, found: str) -> FormatError:
    return FormatError(where=str(path), expected=expected, found=found, hint=DAMAGED)


# The header is padded to a multiple of 8 bytes, so that tensor data is aligned.
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
    """Write the header, then the tensor data piece by piece: only one piece is in memory at a time.

    The concatenated `pieces` are the bytes of all entries, in order. A piece may be a part of a tensor.

    Raises:
        ValueError: the pieces have more or fewer bytes than the entries.
        OSError: the file cannot be written.
    """
    # Without `__metadata__`, transformers rejects the file as a file of another framework.
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
