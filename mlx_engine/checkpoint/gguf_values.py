"""The pieces of a GGUF header: numbers, strings and typed values. Every length is doubted.

A value is read into what Python has for it: numbers to int and float, booleans to bool, strings to str,
arrays of numbers to read-only NumPy arrays, arrays of strings to lists, arrays of arrays to tuples. A string
that is not UTF-8 is kept by `surrogateescape` (llama.cpp takes any bytes, and its test files contain such), so
that it can be written back unchanged; where it is longer than any token could be, it is refused.

Whatever the file says, it costs at most `8 * its size + 1 MB` of memory: what is made is counted.

Source: the layout is that of https://github.com/ggml-org/ggml/blob/d99724f2/docs/gguf.md; what is refused
follows `gguf_init_from_reader` of llama.cpp,
https://github.com/ggml-org/llama.cpp/blob/067d44f6c48459f7a82dbafc6fbd0bae97755a4e/ggml/src/gguf.cpp
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from mlx_engine.checkpoint.gguf_strings import any_strings, short_strings
from mlx_engine.errors import FormatError


class ValueType(IntEnum):
    """The types of metadata values, with the numbers they have in a file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True)
class Value:
    """A metadata value with the type it is to be stored as, where that is not what the writer would choose."""

    kind: ValueType
    value: object


# How `struct` spells each number; NumPy's letters differ (its "l" has 8 bytes on Linux and 4 on Windows).
CODES = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}
DTYPES: dict[ValueType, np.dtype[Any]] = {kind: np.dtype(code) for kind, code in CODES.items()}

MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_DEPTH = 8  # arrays in arrays; no known file nests at all, and llama.cpp refuses those that do

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {kind: struct.Struct(code) for kind, code in CODES.items()}

# Strings are decoded out of pieces of the file of this size, copied one at a time.
_PIECE = 1 << 15
_OBJECT_BYTES = 256  # an array and its header, or an entry of a dict in its emptiest state: rounded up
_SPARE_BYTES = 1 << 18  # of the megabyte; the rest is for what is not counted


def shown(text: object) -> str:
    """`text` for an error message: quoted, escaped, and not longer than a line."""
    quoted = repr(text)
    return quoted if len(quoted) <= 80 else f"{quoted[:60]}... ({len(quoted):,} characters)"


class Cursor:
    """A position in a mapped file. Reads are checked against the bytes left, and name their field."""

    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.buffer, self.path = buffer, path
        self.at, self.size = 0, len(buffer)
        self._allowance = 8 * self.size + _SPARE_BYTES

    def error(self, field: str, *, expected: str, found: str, hint: str, at: int | None = None) -> FormatError:
        """The error to raise for a field that starts at byte `at`, by default the present position."""
        where = f"{self.path}: {field} at byte {self.at if at is None else at:,}"
        return FormatError(where=where, expected=expected, found=found, hint=hint)

    def need(self, n_bytes: int, field: str) -> None:
        """Refuse a field that is longer than what is left of the file."""
        if n_bytes > self.size - self.at:
            raise self.error(
                field,
                expected=f"{n_bytes:,} bytes",
                found=f"only {self.size - self.at:,} bytes left of {self.size:,}",
                hint="the file is cut short or damaged; download or convert it again",
            )

    def spend(self, n_bytes: int, field: str) -> None:
        """Count memory about to be kept; refuse a header that would take many times its file."""
        self._allowance -= n_bytes
        if self._allowance < 0:
            raise self.error(
                field,
                expected="a header that takes at most eight times the file's size in memory",
                found=f"more than that for a file of {self.size:,} bytes",
                hint="no converter writes such a file; it is damaged, or made to exhaust memory",
            )

    def u32(self, field: str) -> int:
        """An unsigned 32-bit number."""
        self.need(4, field)
        (value,) = _U32.unpack_from(self.buffer, self.at)
        self.at += 4
        return int(value)

    def u64(self, field: str) -> int:
        """An unsigned 64-bit number."""
        self.need(8, field)
        (value,) = _U64.unpack_from(self.buffer, self.at)
        self.at += 8
        return int(value)

    def count(self, field: str, *, bytes_each: int) -> int:
        """A number of things of at least `bytes_each` bytes, all of which must still fit the file."""
        at = self.at
        n = self.u64(field)
        if n * bytes_each > self.size - self.at:
            raise self.error(
                field,
                at=at,
                expected=f"at most {(self.size - self.at) // bytes_each:,}, as the rest of the file can hold",
                found=f"{n:,}",
                hint="the file is cut short or damaged; download or convert it again",
            )
        return n

    def string(self, field: str, *, max_bytes: int | None = None) -> str:
        """A string: its length in 8 bytes, then its bytes, which should be UTF-8."""
        at = self.at
        length = self.count(field, bytes_each=1)
        if max_bytes is not None and length > max_bytes:
            hint = "the file is damaged, or made by a faulty converter; download or convert it again"
            raise self.error(field, at=at, expected=f"at most {max_bytes:,} bytes", found=f"{length:,}", hint=hint)
        # The longest text with one wide character takes four bytes for each of its own, and half as much on
        # the way.
        self.spend(4 * length + _OBJECT_BYTES, field)
        errors = "surrogateescape" if length <= _PIECE else "strict"
        try:
            text = self.buffer[self.at : self.at + length].decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.error(
                field,
                expected="text in UTF-8",
                found=f"{length:,} bytes that are not, from the {error.start:,}th on",
                hint="the file is damaged; download or convert it again",
            ) from None
        self.at += length
        return text

    def strings(self, n: int, field: str) -> list[str]:
        """`n` strings one after the other, decoded a piece of the file at a time."""
        out: list[str] = []
        while len(out) < n:
            # 64 bytes for each string to come, so that many short arrays do not copy a whole piece each
            piece = self.buffer[self.at : self.at + min(_PIECE, 64 * (n - len(out)))]
            texts, n_bytes = short_strings(piece, n - len(out)) or any_strings(piece, n - len(out))
            if not texts:  # the next string exceeds a whole piece, or the file
                texts, n_bytes = [self.string(f"{field}[{len(out)}]")], 0
            # From 5 bytes a string on, no text takes more than 8 times its bytes and length; below, it is
            # counted.
            enough = n_bytes >= (8 + 5) * len(texts)
            self.spend(8 * n_bytes if enough else sum(map(str.__sizeof__, texts)) + 9 * len(texts), field)
            self.at += n_bytes
            out += texts
        return out


def read_value_type(cursor: Cursor, field: str) -> ValueType:
    """The number of a value's type, which must be one of the thirteen."""
    at = cursor.at
    number = cursor.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        hint = "the file is damaged, or of a newer format than this reader knows"
        raise cursor.error(field, at=at, expected="a value type from 0 to 12", found=str(number), hint=hint) from None


def read_value(cursor: Cursor, kind: ValueType, field: str, depth: int = 0) -> object:
    """One value of the given type; `depth` counts the arrays around it."""
    if kind == ValueType.ARRAY:
        return _read_array(cursor, field, depth + 1)
    if kind == ValueType.STRING:
        return cursor.string(field)
    layout = _SCALARS[kind]
    cursor.need(layout.size, field)
    (value,) = layout.unpack_from(cursor.buffer, cursor.at)
    cursor.at += layout.size
    return value


def _read_array(cursor: Cursor, field: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        hint = "no converter writes such a file; it is damaged"
        raise cursor.error(field, expected=f"at most {MAX_DEPTH} arrays in one another", found="more", hint=hint)
    kind = read_value_type(cursor, f"{field}, element type,")
    length = f"{field}, length,"
    if kind == ValueType.STRING:
        return cursor.strings(cursor.count(length, bytes_each=8), field)
    if kind == ValueType.ARRAY:
        arrays = []
        for i in range(cursor.count(length, bytes_each=12)):
            cursor.spend(_OBJECT_BYTES, field)
            arrays.append(_read_array(cursor, f"{field}[{i}]", depth + 1))
        return tuple(arrays)
    dtype = DTYPES[kind]
    n = cursor.count(length, bytes_each=dtype.itemsize)
    cursor.spend(2 * n * dtype.itemsize, field)
    raw = cursor.buffer[cursor.at : cursor.at + n * dtype.itemsize]
    cursor.at += len(raw)
    if kind != ValueType.BOOL:
        return np.frombuffer(raw, dtype)
    values = np.frombuffer(raw, np.uint8) != 0  # any byte but 0 is true, as in llama.cpp
    values.flags.writeable = False
    return values
