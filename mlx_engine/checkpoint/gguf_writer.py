"""Write GGUF files. A file that was read can be written back byte for byte.

The stored type of a metadata value follows from its Python type. A bool becomes BOOL, a str STRING, and a float
FLOAT32. An int gets the first of UINT32, INT32, INT64 and UINT64 that can hold it, and a list of ints the first that
can hold all of them. NumPy numbers and arrays get the type of their dtype. A list of ints and floats gets FLOAT32. In
other lists, all elements must have the same type. An empty list becomes an array of strings, and an empty tuple an
array of arrays, because `gguf_values.py` reads an array of strings as a list, and an array of arrays as a tuple. A
`Value` names its stored type; `GGUFFile.typed_metadata()` returns the values of a file with their stored types.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.gguf import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    VERSIONS,
    padded,
)
from mlx_engine.checkpoint.gguf_values import CODES, DTYPES, MAX_DEPTH, MAX_KEY_BYTES, Value, ValueType
from mlx_engine.errors import OptionError, SourceError, shown
from mlx_engine.kernels.files import draft
from mlx_engine.quant.types import GGMLType


class Tensor(Protocol):
    """A tensor to write: a `Weight`, or an object that computes `data` on access. `data` is accessed once."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The row-major shape."""

    @property
    def type(self) -> GGMLType:
        """The stored type."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of `data`."""

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

    `alignment`, in bytes, is stored as `general.alignment`. Without `alignment`, the value of `general.alignment` in
    the metadata is used, and 32 if the metadata has no such key.

    Raises:
        OptionError: GGUF cannot store a key, value, name or shape, or the version or alignment is invalid.
        SourceError: the file cannot be written.
    """
    if version not in VERSIONS:
        raise OptionError(f"version must be 2 or 3, not {shown(version)}", option="version", found=version)
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
                _write_padded(stream, header, step if weights else 1)  # a file without tensors is not padded
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
    message = f"{ALIGNMENT_KEY} must be a power of two, as UINT32, not {shown(number)}"
    raise OptionError(message, option=ALIGNMENT_KEY, found=number)


def _records(weights: Sequence[Tensor], alignment: int) -> bytes:
    out: list[bytes] = []
    seen: set[str] = set()
    offset = 0
    for weight in weights:
        option = f"tensor {shown(weight.name)}"
        if weight.name in seen:
            raise OptionError(f"{option}: there is a second tensor of this name", option=option)
        seen.add(weight.name)
        if len(weight.shape) > MAX_DIMS:
            message = f"{option} has shape {weight.shape}; GGUF stores at most {MAX_DIMS} dimensions"
            raise OptionError(message, option=option, found=weight.shape)
        dims = struct.pack(f"<I{len(weight.shape)}Q", len(weight.shape), *reversed(weight.shape))
        record = struct.pack("<IQ", weight.type.id, offset)
        out += [_string(weight.name, option, MAX_NAME_BYTES), dims, record]
        offset += padded(weight.nbytes, alignment)
    return b"".join(out)


def _pair(key: str, value: object) -> bytes:
    option = f"metadata {shown(key)}"
    if not key:
        raise OptionError(f"{option}: the key is empty", option=option)
    kind, inner = (value.kind, value.value) if isinstance(value, Value) else (_kind_of(value, option), value)
    return _string(key, option, MAX_KEY_BYTES) + struct.pack("<I", kind) + _encoded(kind, inner, option, 0)


_KIND_OF = {dtype: kind for kind, dtype in DTYPES.items()}
_INTEGERS = (ValueType.UINT32, ValueType.INT32, ValueType.INT64, ValueType.UINT64)


def _kind_of(value: object, option: str) -> ValueType:
    """Return the stored type of a value that is not a `Value`; raise OptionError if no GGUF type can store it."""
    if isinstance(value, str):
        return ValueType.STRING
    if isinstance(value, np.generic) and value.dtype in _KIND_OF:
        return _KIND_OF[value.dtype]
    if isinstance(value, list | tuple | np.ndarray):
        return ValueType.ARRAY
    if isinstance(value, bool | int | float):
        return _common_kind([value], option)
    message = f"{option} must be a number, a bool, a str, or arrays of these, not {shown(value)}"
    raise OptionError(message, option=option, found=value)


def _common_kind(values: Sequence[object], option: str) -> ValueType:
    """Return the type that stores all of these numbers or bools; raise OptionError if no GGUF type can."""
    if all(isinstance(value, bool) for value in values):
        return ValueType.BOOL
    integers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(integers) == len(values):
        for kind in _INTEGERS:
            limits = np.iinfo(DTYPES[kind])
            if limits.min <= min(integers) and max(integers) <= limits.max:
                return kind
    elif len(integers) + sum(isinstance(value, float) for value in values) == len(values):
        return ValueType.FLOAT32
    message = f"{option} must be numbers of one type, of at most 64 bits, not {shown(values)}"
    raise OptionError(message, option=option, found=values)


def _encoded(kind: ValueType, value: object, option: str, depth: int) -> bytes:
    """Return the bytes of a value that is stored as `kind`; `depth` is the number of enclosing arrays.

    Raises:
        OptionError: `kind` cannot hold the value.
    """
    if kind == ValueType.ARRAY:
        return _encode_array(value, option, depth + 1)
    if kind == ValueType.STRING:
        return _string(value, option)
    try:
        return struct.pack(CODES[kind], value)
    except (struct.error, OverflowError):
        message = f"{option}: {kind.name} cannot hold {shown(value)}"
        raise OptionError(message, option=option, found=value) from None


def _encode_array(value: object, option: str, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise OptionError(f"{option} has more than {MAX_DEPTH} nested arrays", option=option)
    if isinstance(value, np.ndarray):
        kind = _KIND_OF.get(value.dtype)
        if kind is None or value.ndim != 1:
            found = f"{value.dtype} in {value.ndim} dimensions"
            message = f"{option} must have one dimension, of numbers of at most 64 bits, not {found}"
            raise OptionError(message, option=option, found=found)
        return struct.pack("<IQ", kind, len(value)) + value.tobytes()
    if not isinstance(value, list | tuple):
        message = f"{option} must be a list, a tuple or a NumPy array, not {shown(value)}"
        raise OptionError(message, option=option, found=value)
    if all(isinstance(item, str) for item in value) and (value or isinstance(value, list)):
        kind = ValueType.STRING
    elif all(isinstance(item, list | tuple | np.ndarray) for item in value):
        kind = ValueType.ARRAY
    else:
        kind = _common_kind(value, option)
    items = (_encoded(kind, item, f"{option}[{i}]", depth) for i, item in enumerate(value))
    # Every array, also an inner one, begins with the type and the number of its elements.
    return struct.pack("<IQ", kind, len(value)) + b"".join(items)


def _string(text: object, option: str, max_bytes: int = 1 << 30) -> bytes:
    """Return the bytes of a string: its length, then its text in UTF-8. Raise OptionError if GGUF cannot store it."""
    if not isinstance(text, str):
        raise OptionError(f"{option} must be a str, not {shown(text)}", option=option, found=text)
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        message = f"{option} must be text that UTF-8 can encode, not {shown(text)}"
        raise OptionError(message, option=option, found=text) from None
    if len(data) > max_bytes:
        message = f"{option} must have at most {max_bytes:,} bytes, not {len(data):,}"
        raise OptionError(message, option=option, found=len(data))
    return struct.pack("<Q", len(data)) + data
