"""The buffers of a whole kernel: bytes from arrays, structures and numbers, and arrays from bytes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .arrays import array_at, memory_of, output_bytes
from .errors import LaunchError
from .metal_parameters import MetalParameter
from .signature import TYPES, dtype_name

# Types of `constant T&` parameters that a Python number can stand for, and NumPy's names of them.
_SCALARS = {metal: dtype for dtype, metal in TYPES.items() if dtype not in ("bfloat16", "complex64")} | {
    **{"half": "float16", "char": "int8", "uchar": "uint8", "short": "int16", "ushort": "uint16", "int": "int32"},
    **{"uint": "uint32", "long": "int64", "ulong": "uint64", "size_t": "uint64", "unsigned int": "uint32"},
}


@dataclass(frozen=True)
class Unwritten:
    """A buffer without a value, full of NaN, for what a kernel writes.

    Attributes:
        shape: elements per axis.
        dtype: of MLX, or of NumPy, which may be structured.
    """

    shape: Sequence[int]
    dtype: Any


@dataclass(frozen=True)
class Contents:
    """The bytes of a buffer; None if it has no value yet.

    Attributes:
        size: their number.
        bytes: the bytes.
        like: the value that they came from.
    """

    size: int
    bytes: NDArray[np.uint8] | None
    like: Any

    @property
    def item(self) -> int:
        """The bytes of an element."""
        shape = getattr(self.like, "shape", None)
        return max(1, self.size // max(1, math.prod(shape))) if shape is not None else 1

    def is_same(self, other: Contents) -> bool:
        """Whether both are one array, which is then one buffer."""
        return self.like is other.like and isinstance(self.like, mx.array | np.ndarray | Unwritten | bytearray)

    def array(self, address: int) -> Any:
        """Return the bytes at an address as a value of the kind that was given."""
        if isinstance(self.like, mx.array | Unwritten) and dtype_name(self.like.dtype) in TYPES:
            found = array_at(address, self.like.shape, dtype_name(self.like.dtype))
            return found if isinstance(self.like.dtype, mx.Dtype) else np.array(found)
        data = ctypes.string_at(address, self.size)
        if isinstance(self.like, Unwritten | np.ndarray | np.generic):
            return np.frombuffer(data, self.like.dtype).reshape(tuple(self.like.shape)).copy()
        return data


def contents(kernel: str, parameter: MetalParameter, value: Any) -> Contents:
    """Return the bytes of a buffer's value.

    Raises:
        LaunchError: the value is a number, and the parameter is not.
    """
    if isinstance(value, Unwritten):
        if dtype_name(value.dtype) in TYPES:
            return Contents(output_bytes(value.shape, dtype_name(value.dtype)), None, value)
        return Contents(int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize, None, value)
    if isinstance(value, bytes | bytearray):
        return _filled(np.frombuffer(bytes(value), np.uint8), value)
    if isinstance(value, mx.array):
        return _filled(memory_of(value, row_contiguous=True).owner, value)
    if isinstance(value, np.ndarray | np.generic):
        return _filled(np.asarray(value), value)
    if isinstance(value, int | float) and parameter.type in _SCALARS:
        return _filled(np.array([value], _SCALARS[parameter.type]), value)
    raise LaunchError(
        f"kernel '{kernel}', buffer {parameter.slot} ('{parameter.name}', {parameter.type}): expected an array of MLX "
        f"or NumPy, bytes, Unwritten(shape, dtype) or, for a parameter of a simple type, a number; found {value!r}"
    )


def _filled(array: NDArray[Any], like: Any) -> Contents:
    data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return Contents(data.size, data, like)
