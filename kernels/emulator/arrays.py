"""Convert MLX arrays to memory, and memory to MLX arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .signature import TYPES, dtype_name

_SIZES = {"bfloat16": 2}


class Memory(NamedTuple):
    """The memory of an array.

    Attributes:
        dtype: the MLX name of its type.
        shape: elements per axis.
        strides: elements from one index to the next, per axis.
        origin: the address of element 0.
        first: the lowest address of any element.
        size: bytes from `first` to the highest address.
        owner: the object that keeps the memory alive.
        source: the object that the caller passed.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    origin: int
    first: int
    size: int
    owner: np.ndarray[Any, Any]
    source: Any


def item_size(dtype: str) -> int:
    """Return the bytes per element."""
    return _SIZES.get(dtype) or np.dtype(dtype).itemsize


def memory_of(array: Any, *, row_contiguous: bool) -> Memory:
    """Return the memory of an array, copied first if it must be row-contiguous and is not."""
    # Numbers and lists become MLX arrays; so do NumPy arrays whose dtype MLX lacks.
    if not isinstance(array, mx.array) and dtype_name(getattr(array, "dtype", None)) not in TYPES:
        array = mx.array(array)
    dtype = dtype_name(array.dtype)
    # NumPy has no bfloat16, so its view has integers of the same size.
    view = np.asarray(array.view(mx.uint16) if dtype == "bfloat16" else array)
    if row_contiguous and not view.flags.c_contiguous:
        view = np.ascontiguousarray(view)
    item = view.itemsize
    strides = tuple(stride // item for stride in view.strides)
    origin = view.ctypes.data
    if view.size == 0:
        return Memory(dtype, view.shape, strides, origin, origin, 0, view, array)
    reach = [(n - 1) * stride for n, stride in zip(view.shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return Memory(dtype, view.shape, strides, origin, origin + low * item, (high - low + 1) * item, view, array)


def output_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a row-contiguous array."""
    return math.prod(shape) * item_size(dtype)


def fill(address: int, size: int, dtype: str, value: float) -> None:
    """Set every element."""
    if size:
        one = np.array(mx.array([value], dtype=_mlx_dtype(dtype)).view(mx.uint8))
        _bytes_at(address, size).reshape(-1, one.size)[:] = one


def _mlx_dtype(name: str) -> mx.Dtype:
    return getattr(mx, "bool_" if name == "bool" else name)  # type: ignore[no-any-return]


def array_at(address: int, shape: Sequence[int], dtype: str) -> mx.array:
    """Return a copy of memory as an MLX array."""
    size = output_bytes(shape, dtype)
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    values = mx.array(_bytes_at(address, size).view(kind).reshape(tuple(shape)))
    return values.view(mx.bfloat16) if dtype == "bfloat16" else values


def _bytes_at(address: int, size: int) -> np.ndarray[Any, Any]:
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
