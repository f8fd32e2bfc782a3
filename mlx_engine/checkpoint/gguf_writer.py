"""Write GGUF files. A file that was read can be written back byte for byte.

The stored type of a metadata value follows its Python type: bool is BOOL and str is STRING; an int is the first of
UINT32, INT32, INT64 and UINT64 that holds it; a float is FLOAT32; NumPy numbers and arrays have the type of their
dtype. All elements of a list have one type; an empty list is an array of strings and an empty tuple an array of
arrays, as the reader returns them. `Value` sets another type; `GGUFFile.typed_metadata()` returns all values with
the types that the file had.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.gguf import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, VERSIONS
from mlx_engine.checkpoint.gguf_encoding import encoded, kind_of, string
from mlx_engine.checkpoint.gguf_tensors import MAX_DIMS, MAX_NAME_BYTES, padded
from mlx_engine.checkpoint.gguf_types import Value, ValueType
from mlx_engine.checkpoint.gguf_values import MAX_KEY_BYTES, shown
from mlx_engine.errors import OptionError, SourceError, Words
from mlx_engine.kernels.drafts import draft
from mlx_engine.quant.types import GGMLType


class Tensor(Protocol):
    """A tensor to write: a `Weight`, or an object that computes `data` on access. `data` is accessed once."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major."""

    @property
    def type(self) -> GGMLType:
        """The stored type."""

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The stored bytes, in one dimension."""


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Iterable[Tensor],
    *,
    version: int = 3,
    alignment: int | None = None,
) -> None:
    """Write metadata and tensors in the given order. The file appears only when it is complete.

    `alignment` is stored as `general.alignment`; without both, tensors are aligned to 32 bytes.

    Raises:
        OptionError: GGUF cannot store a key, value, name or shape.
        SourceError: the file cannot be written.
    """
    if version not in VERSIONS:
        raise OptionError(option="version", expected="2 or 3", found=version)
    values = dict(metadata)
    if alignment is not None:
        values[ALIGNMENT_KEY] = Value(ValueType.UINT32, alignment)
    step = _alignment(values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    weights = list(tensors)
    header = MAGIC + struct.pack("<IQQ", version, len(weights), len(values))
    header += b"".join(_pair(key, value) for key, value in values.items()) + _records(weights, step)

    target = Path(path)
    try:
        with draft(target) as path:
            with path.open("wb") as stream:
                _write_padded(stream, header, step if weights else 1)  # a file without tensor data is not padded
                for weight in weights:
                    _write_padded(stream, weight.data.data, step)
            path.replace(target)
    except OSError as error:
        raise SourceError(f"{target}: cannot be written ({error.strerror}); check folder and space") from error


def _write_padded(stream: BinaryIO, data: bytes | memoryview, alignment: int) -> None:
    stream.write(data)
    stream.write(bytes(padded(len(data), alignment) - len(data)))


def _alignment(value: object) -> int:
    number = value.value if isinstance(value, Value) else value
    is_uint32 = not isinstance(value, Value) or value.kind == ValueType.UINT32
    if is_uint32 and type(number) is int and 0 < number < 1 << 32 and number.bit_count() == 1:
        return number
    raise OptionError(option=ALIGNMENT_KEY, expected="a power of two, as UINT32", found=number)


def _records(weights: Sequence[Tensor], alignment: int) -> bytes:
    out: list[bytes] = []
    seen: set[str] = set()
    offset = 0
    for weight in weights:
        option = f"tensor {shown(weight.name)}"
        if weight.name in seen:
            raise OptionError(option=option, expected="a unique name", found=Words("a second tensor of this name"))
        seen.add(weight.name)
        if len(weight.shape) > MAX_DIMS:
            raise OptionError(option=option, expected=f"at most {MAX_DIMS} dimensions", found=weight.shape)
        dims = struct.pack(f"<I{len(weight.shape)}Q", len(weight.shape), *reversed(weight.shape))
        record = struct.pack("<IQ", weight.type.id, offset)
        out += [string(weight.name, option, MAX_NAME_BYTES), dims, record]
        offset += padded(weight.nbytes, alignment)
    return b"".join(out)


def _pair(key: str, value: object) -> bytes:
    option = f"metadata {shown(key)}"
    if not key:
        raise OptionError(option=option, expected="a non-empty key", found=Words("an empty key"))
    kind, inner = (value.kind, value.value) if isinstance(value, Value) else (kind_of(value, option), value)
    return string(key, option, MAX_KEY_BYTES) + struct.pack("<I", kind) + encoded(kind, inner, option, 0)
