"""Parse the values of a GGUF header: numbers, strings and typed metadata. Every length is checked.

Numbers become int and float, booleans bool, strings str. An array of numbers or booleans becomes a read-only NumPy
array, an array of strings a list, and an array of arrays a tuple. A string of at most 32 KiB that is not UTF-8 is
decoded with `surrogateescape`, so that it can be written back unchanged: llama.cpp accepts any bytes, and its test
files contain such strings. A longer string cannot be a token, and must be UTF-8.

Allocations are counted and limited, so a damaged or malicious header needs at most `8 * file size + 1 MB` of memory.

Source: the layout is that of https://github.com/ggml-org/ggml/blob/d99724f2/docs/gguf.md; the checks are those of
llama.cpp, see `gguf.py`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from mlx_engine.errors import FormatError


class ValueType(IntEnum):
    """The types of metadata values. Their numbers are those in the file."""

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
    """A metadata value with an explicit stored type, for `write_gguf`."""

    kind: ValueType
    value: object


# The format code of each number type. `struct` and NumPy read each code as the same type, on every system. The code
# "<l" is not used, because it has 4 bytes in `struct`, but 8 in NumPy on Linux.
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


def short_strings(piece: bytes, n: int) -> tuple[list[str], int] | None:
    """Decode up to `n` strings at the start of `piece`, without a Python loop; return them and their number of bytes.

    A vocabulary has hundreds of thousands of strings, so a Python loop over them is too slow. A string is stored as a
    length of 8 bytes and a text. A length below 256 is one byte and seven zeros. Texts rarely contain such a sequence,
    so every such sequence is assumed to be a length. All lengths are set to zero, and one `split` at eight zeros gives
    all strings. Return None if a string does not end where the next one starts, if a text contains a zero byte, or if
    `piece` has no complete string.
    """
    if len(piece) < 8:
        return None
    numbers = np.ndarray((len(piece) - 7,), "<u8", piece, strides=(1,))
    starts = np.flatnonzero(numbers < 256)[:n]
    ends = starts + 8 + numbers[starts].astype(np.int64)
    if starts.size == 0 or starts[0] != 0 or np.any(ends[:-1] != starts[1:]):
        return None
    if ends[-1] > len(piece):
        starts, ends = starts[:-1], ends[:-1]
    if starts.size == 0:
        return None
    n_bytes = int(ends[-1])
    flat = np.frombuffer(piece, np.uint8, n_bytes).copy()
    flat[starts] = 0
    if np.count_nonzero(flat) != n_bytes - 8 * starts.size:  # a text contains zeros, at which `split` might cut it
        return None
    return flat.tobytes().decode("utf-8", "surrogateescape").split("\0" * 8)[1:], n_bytes


def any_strings(piece: bytes, n: int) -> tuple[list[str], int]:
    """Decode up to `n` complete strings of `piece` one by one; return them and their number of bytes in the file."""
    out: list[str] = []
    at, last = 0, len(piece) - 8
    for _ in range(n):
        if at > last:
            break
        end = at + 8 + _U64.unpack_from(piece, at)[0]
        if end > len(piece):
            break
        out.append(piece[at + 8 : end].decode("utf-8", "surrogateescape"))
        at = end
    return out, at


CUT_SHORT = "the file is cut short or damaged; download or convert it again"
FAULTY = "the file is damaged, or made by a faulty converter; download or convert it again"

MAX_KEY_BYTES = (1 << 16) - 1  # the limit in the specification of GGUF
MAX_DEPTH = 8  # levels of nested arrays; no known file nests arrays, and llama.cpp rejects nested arrays

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {kind: struct.Struct(code) for kind, code in CODES.items()}

# Arrays of strings are copied and decoded in pieces of this many bytes. A string with more bytes must be UTF-8.
_PIECE = 1 << 15
_OBJECT_BYTES = 256  # an upper bound on the bytes of a Python str or array and of its dict entry, without the data
# Counted allocations may exceed 8 * file size by this many bytes. The rest of the 1 MB in the
# docstring above is for allocations that are not counted.
_SPARE_BYTES = 1 << 18


class Cursor:
    """A read position in a mapped file. Reads are bounds-checked; errors name the field that was read."""

    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.buffer, self.path = buffer, path
        self.at, self.size = 0, len(buffer)
        self._allowance = 8 * self.size + _SPARE_BYTES

    def error(self, field: str, *, expected: str, found: str, hint: str, at: int | None = None) -> FormatError:
        """Return the error to raise for the field at byte `at` (default: the current position)."""
        where = f"{self.path}: {field} at byte {self.at if at is None else at:,}"
        return FormatError(where=where, expected=expected, found=found, hint=hint)

    def need(self, n_bytes: int, field: str) -> None:
        """Raise FormatError if fewer than `n_bytes` are left in the file."""
        if n_bytes > self.size - self.at:
            raise self.error(
                field,
                expected=f"{n_bytes:,} bytes",
                found=f"only {self.size - self.at:,} bytes left of {self.size:,}",
                hint=CUT_SHORT,
            )

    def spend(self, n_bytes: int, field: str) -> None:
        """Count `n_bytes` that will be allocated; raise FormatError if the header would take too much memory."""
        self._allowance -= n_bytes
        if self._allowance < 0:
            raise self.error(
                field,
                expected="a header that needs at most eight times the file's size in memory",
                found=f"more than that for a file of {self.size:,} bytes",
                hint="no converter writes such a file; it is damaged, or made to exhaust memory",
            )

    def number(self, layout: struct.Struct, field: str) -> Any:
        """Read a number or a boolean."""
        self.need(layout.size, field)
        (value,) = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return value

    def u32(self, field: str) -> int:
        """Read an unsigned 32-bit integer."""
        return int(self.number(_U32, field))

    def u64(self, field: str) -> int:
        """Read an unsigned 64-bit integer."""
        return int(self.number(_U64, field))

    def count(self, field: str, *, bytes_each: int) -> int:
        """Read the number of items that follow.

        Raises:
            FormatError: the rest of the file is too short for the items, each of which has at least `bytes_each` bytes.
        """
        at = self.at
        n = self.u64(field)
        if n * bytes_each > self.size - self.at:
            raise self.error(
                field,
                at=at,
                expected=f"at most {(self.size - self.at) // bytes_each:,} (the rest of the file holds no more)",
                found=f"{n:,}",
                hint=CUT_SHORT,
            )
        return n

    def string(self, field: str, *, max_bytes: int | None = None) -> str:
        """Read a string: an 8-byte length, then bytes that should be UTF-8."""
        at = self.at
        length = self.count(field, bytes_each=1)
        if max_bytes is not None and length > max_bytes:
            expected = f"at most {max_bytes:,} bytes"
            raise self.error(field, at=at, expected=expected, found=f"{length:,}", hint=FAULTY)
        # A Python str with one character above U+FFFF needs four bytes for every character. The decoder's temporary
        # buffer, which may need two more bytes per character, is not counted.
        self.spend(4 * length + _OBJECT_BYTES, field)
        errors = "surrogateescape" if length <= _PIECE else "strict"
        try:
            text = self.buffer[self.at : self.at + length].decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.error(
                field,
                expected="text in UTF-8",
                found=f"{length:,} bytes that are not UTF-8 from byte {error.start:,} on",
                hint="the file is damaged; download or convert it again",
            ) from None
        self.at += length
        return text

    def strings(self, n: int, field: str) -> list[str]:
        """Read `n` consecutive strings, decoding a piece of the file at a time."""
        out: list[str] = []
        while len(out) < n:
            # Copy at most 64 bytes per remaining string, because a short array does not need a whole piece.
            piece = self.buffer[self.at : self.at + min(_PIECE, 64 * (n - len(out)))]
            texts, n_bytes = short_strings(piece, n - len(out)) or any_strings(piece, n - len(out))
            if not texts:  # the next string is longer than `piece`, or than the rest of the file
                texts, n_bytes = [self.string(f"{field}[{len(out)}]")], 0
            # If texts have 5 or more bytes on average, the Python objects need at most 8 times the bytes of texts and
            # lengths in the file. For shorter texts, add up the objects' sizes, plus 9 bytes each for the list.
            enough = n_bytes >= (8 + 5) * len(texts)
            self.spend(8 * n_bytes if enough else sum(map(str.__sizeof__, texts)) + 9 * len(texts), field)
            self.at += n_bytes
            out += texts
        return out


def read_value_type(cursor: Cursor, field: str) -> ValueType:
    """Read a value type; raise FormatError for an unknown number."""
    at = cursor.at
    number = cursor.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        hint = "the file is damaged, or its format is newer than this reader supports"
        raise cursor.error(field, at=at, expected="a value type from 0 to 12", found=str(number), hint=hint) from None


def read_value(cursor: Cursor, kind: ValueType, field: str, depth: int = 0) -> object:
    """Read a value of the given type; `depth` is the number of enclosing arrays."""
    if kind == ValueType.ARRAY:
        return _read_array(cursor, field, depth + 1)
    if kind == ValueType.STRING:
        return cursor.string(field)
    return cursor.number(_SCALARS[kind], field)


def _read_array(cursor: Cursor, field: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        hint = "no converter writes such a file; it is damaged"
        raise cursor.error(field, expected=f"at most {MAX_DEPTH} nested arrays", found="more", hint=hint)
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
