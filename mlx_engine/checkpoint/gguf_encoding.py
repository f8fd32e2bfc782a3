"""Encode metadata values for a GGUF file: choose the type of each, and write its bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from mlx_engine.checkpoint.gguf_types import CODES, DTYPES, ValueType
from mlx_engine.checkpoint.gguf_values import MAX_DEPTH, shown
from mlx_engine.errors import OptionError

_KIND_OF = {dtype: kind for kind, dtype in DTYPES.items()}
# An int without an explicit type gets the first of these types that holds it.
_INTEGERS = (ValueType.UINT32, ValueType.INT32, ValueType.INT64, ValueType.UINT64)


def kind_of(value: object, option: str) -> ValueType:
    """Return the stored type of a value without an explicit type.

    Raises:
        OptionError: GGUF has no type for the value. The error names `option`.
    """
    if isinstance(value, str):
        return ValueType.STRING
    if isinstance(value, np.generic) and value.dtype in _KIND_OF:
        return _KIND_OF[value.dtype]
    if isinstance(value, list | tuple | np.ndarray):
        return ValueType.ARRAY
    if isinstance(value, bool | int | float):
        return _common_kind([value], option)
    raise OptionError(option=option, expected="a number, a bool, a str, or arrays of these", found=value)


def _common_kind(values: Sequence[object], option: str) -> ValueType:
    """Return the first type that holds every number of a sequence."""
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


def encoded(kind: ValueType, value: object, option: str, depth: int) -> bytes:
    """Return the bytes of a value that is stored as `kind`; `depth` counts the arrays around it.

    Raises:
        OptionError: the type cannot hold the value. The error names `option`.
    """
    if kind == ValueType.ARRAY:
        return _encode_array(value, option, depth + 1)
    if kind == ValueType.STRING:
        return string(value, option)
    try:
        return struct.pack(CODES[kind], value)
    except (struct.error, OverflowError):
        raise OptionError(option=option, expected=f"a value that {kind.name} holds", found=value) from None


def _encode_array(value: object, option: str, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise OptionError(f"{option} has more than {MAX_DEPTH} nested arrays", option=option)
    if isinstance(value, np.ndarray):
        kind = _KIND_OF.get(value.dtype)
        if kind is None or value.ndim != 1:
            found = f"{value.dtype} in {value.ndim} dimensions"
            raise OptionError(option=option, expected="one dimension of numbers of at most 64 bits", found=found)
        return struct.pack("<IQ", kind, len(value)) + value.tobytes()
    if not isinstance(value, list | tuple):
        raise OptionError(option=option, expected="a list, a tuple or a NumPy array", found=value)
    if all(isinstance(item, str) for item in value) and (value or isinstance(value, list)):
        kind = ValueType.STRING
    elif all(isinstance(item, list | tuple | np.ndarray) for item in value):
        kind = ValueType.ARRAY
    else:
        kind = _common_kind(value, option)
    items = (encoded(kind, item, f"{option}[{i}]", depth) for i, item in enumerate(value))
    # Inner arrays begin with their own element type; `encoded` writes no type before a value.
    return struct.pack("<IQ", kind, len(value)) + b"".join(items)


def string(text: object, option: str, max_bytes: int = 1 << 30) -> bytes:
    """Return the bytes of a string: its length, then its text in UTF-8.

    Raises:
        OptionError: the value is not a string, or is too long.
    """
    if not isinstance(text, str):
        raise OptionError(option=option, expected="a str", found=text)
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        message = f"{option} must be text that UTF-8 can encode, not {shown(text)}"
        raise OptionError(message, option=option, found=text) from None
    if len(data) > max_bytes:
        message = f"{option} must have at most {max_bytes:,} bytes, not {len(data):,}"
        raise OptionError(message, option=option, found=len(data))
    return struct.pack("<Q", len(data)) + data
