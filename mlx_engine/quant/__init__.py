"""Quantise and dequantise weights in NumPy: the block formats of GGUF, and those of MLX (`groups.py`).

Each readable format of GGUF has a function `dequantize_*` in one of the other modules. The function converts blocks,
(n, block bytes) uint8, to weights, (n, block size) float32. Formats that this project can write also have the inverse
function, `quantize_*`. This module applies the function of a type to a tensor piece by piece, so that temporary arrays
stay small. Dequantised values are bit-identical to those of the `gguf` package and of MLX; `groups.dequantize_group`
describes the exception: weights in MLX's types with 16-bit scales.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.errors import UnsupportedTypeError
from mlx_engine.quant import floats, groups, k_quants, legacy, low_bit
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.types import BY_ID, BY_NAME, TYPES, GGMLType

Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Quantize = Callable[[NDArray[np.float32]], NDArray[np.uint8]]


def _by_type(prefix: str) -> dict[str, Any]:
    """Return a dict that maps the name of each type, such as "Q4_K", to its function, such as `{prefix}q4_k`."""
    modules = (floats, legacy, k_quants, low_bit)
    functions = {name: function for module in modules for name, function in vars(module).items()}
    return {name.removeprefix(prefix).upper(): of for name, of in functions.items() if name.startswith(prefix)}


_DEQUANTIZE: dict[str, Dequantize] = _by_type("dequantize_")
_QUANTIZE: dict[str, Quantize] = _by_type("quantize_")

# The number of weights per piece. The temporary arrays of a piece, a few bytes per weight, fit into a core's L2 cache.
_PIECE = 1 << 16


def readable_types() -> tuple[GGMLType, ...]:
    """Return GGUF's types that `dequantize` supports, sorted by type number; all types of MLX are supported, too."""
    return tuple(type_ for type_ in TYPES if type_.name in _DEQUANTIZE)


def writable_types() -> tuple[GGMLType, ...]:
    """Return the types that `quantize` supports, sorted by type number."""
    return tuple(type_ for type_ in TYPES if type_.name in _QUANTIZE)


def dequantize(raw: NDArray[np.uint8], type_: GGMLType, *, where: str = "dequantize") -> NDArray[np.float32]:
    """Return the weights stored in `raw` as a float32 vector. `where` describes the weights in error messages.

    Raises:
        UnsupportedTypeError: dequantising the type is not implemented.
        ValueError: the bytes do not fill whole blocks.
    """
    function = _reader(type_, where)
    blocks = _in_rows_of(type_.block_bytes, np.ascontiguousarray(raw, dtype=np.uint8))
    out = np.empty((len(blocks), type_.block_size), dtype=np.float32)
    return _converted(function, blocks, out, type_)


def quantize(values: NDArray[np.floating], type_: GGMLType, *, where: str = "quantize") -> NDArray[np.uint8]:
    """Return the bytes of `values` stored as `type_`, in row-major order.

    The length of a row must be a multiple of the block size; only the number of all values is checked.

    Raises:
        UnsupportedTypeError: quantising to the type is not implemented.
        ValueError: the number of values is not a multiple of the block size; or a value is NaN or infinite, and the
            type cannot store such values.
    """
    function = _writer(type_, where)
    blocks = _in_rows_of(type_.block_size, np.ascontiguousarray(values, dtype=np.float32))
    out = np.empty((len(blocks), type_.block_bytes), dtype=np.uint8)
    return _converted(function, blocks, out, type_)


def _converted(function: Any, blocks: NDArray[Any], out: NDArray[Any], type_: GGMLType) -> NDArray[Any]:
    """Write `function(blocks)` into `out`, piece by piece, and return `out` as a vector."""
    step = max(1, _PIECE // type_.block_size)
    for start in range(0, len(blocks), step):
        out[start : start + step] = function(blocks[start : start + step])
    return out.reshape(-1)


def requantize(
    raw: NDArray[np.uint8], from_: GGMLType, to: GGMLType, *, where: str = "requantize", threads: int = 1
) -> NDArray[np.uint8]:
    """Convert the weights in `raw` from type `from_` to type `to`, piece by piece. `threads` does not change the bytes.

    Raises:
        UnsupportedTypeError: dequantising `from_` or quantising to `to` is not implemented.
        ValueError: the weights do not fill whole blocks; or a weight is NaN or infinite, and `to` cannot store such
            values.
    """
    read, write = _reader(from_, where), _writer(to, where)
    blocks = _in_rows_of(from_.block_bytes, np.ascontiguousarray(raw, dtype=np.uint8))
    n_weights = len(blocks) * from_.block_size
    if n_weights % to.block_size:
        raise ValueError(f"{n_weights:,} weights are not a multiple of the block size, {to.block_size}")
    out = np.empty((n_weights // to.block_size, to.block_bytes), dtype=np.uint8)

    def convert(start: int) -> None:
        some = read(blocks[start // from_.block_size : (start + _PIECE) // from_.block_size])
        out[start // to.block_size : (start + _PIECE) // to.block_size] = write(some.reshape(-1, to.block_size))

    if threads == 1 or n_weights <= _PIECE:
        for start in range(0, n_weights, _PIECE):
            convert(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(convert, range(0, n_weights, _PIECE)), maxlen=0)
    return out.reshape(-1)


def _reader(type_: GGMLType, where: str) -> Dequantize:
    if isinstance(type_, GroupType):
        return partial(groups.dequantize_group, type_)
    function = _DEQUANTIZE.get(type_.name)
    if function is None:
        raise _unsupported(where, type_, "read", readable_types())
    return function


def _writer(type_: GGMLType, where: str) -> Quantize:
    function = _QUANTIZE.get(type_.name)
    if function is None:
        raise _unsupported(where, type_, "written", writable_types())
    return function


def _in_rows_of(length: int, array: NDArray[Any]) -> NDArray[Any]:
    if array.size % length:
        raise ValueError(f"{array.size:,} elements are not a multiple of the block size, {length}")
    return array.reshape(-1, length)


def _unsupported(where: str, type_: GGMLType, verb: str, types: tuple[GGMLType, ...]) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        where=where,
        expected=f"a type that can be {verb} ({', '.join(t.name for t in types)})",
        found=type_.name,
        hint="use one of these types, for example Q8_0",
    )


__all__ = [
    "BY_ID",
    "BY_NAME",
    "TYPES",
    "GGMLType",
    "dequantize",
    "quantize",
    "readable_types",
    "requantize",
    "writable_types",
]
