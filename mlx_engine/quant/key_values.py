"""The types in which the KV cache stores keys and values, in NumPy: the definition that all backends follow.

A row is the key or the value of one head and one token, E numbers (the head dim). `f32` is exact; `f16` and `bf16`
round to nearest even; `q8_0` divides a row into ggml's blocks of 32 numbers. With float32 activations, attention
computes in float32 with the rounded values. A store is the memory of the keys and values of one layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.quant.types import BY_NAME

# Maps each type of keys and values to the NumPy type of a store's elements. NumPy has no bfloat16, so a store of `bf16`
# has the bits as uint16.
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "q8_0": np.uint8}


def default_type(activations: str) -> str:
    """Return the default type of keys and values: the type of activations if it is f16 or bf16, else f32."""
    return activations if activations in DTYPES else "f32"


def types_text(activations: str, kv_type: str) -> str:
    """Return the types that differ from the defaults for a report, as in ", activations i16, keys and values q8_0"."""
    text = "" if activations == "f32" else f", activations {activations}"
    return text if kv_type == default_type(activations) else f"{text}, keys and values {kv_type}"


def fits(head_dim: int, type_: str) -> bool:
    """Return whether a row of `head_dim` numbers fills whole blocks of the type."""
    return head_dim % BY_NAME[type_.upper()].block_size == 0


def row_nbytes(head_dim: int, type_: str) -> int:
    """Return the bytes of a row; raise ValueError if the row does not fill whole blocks."""
    return BY_NAME[type_.upper()].bytes_for(head_dim)


def row_length(head_dim: int, type_: str) -> int:
    """Return the length of a row in a store, in elements of `DTYPES[type_]`."""
    return row_nbytes(head_dim, type_) // np.dtype(DTYPES[type_]).itemsize


def stored(x: NDArray[np.float32], type_: str) -> NDArray[np.generic]:
    """Round rows (..., E) to a type, and return them as stored: (..., row_length) elements of `DTYPES[type_]`."""
    if type_ == "f32":
        return x
    rows = quant.quantize(x, BY_NAME[type_.upper()]).view(DTYPES[type_])
    return rows.reshape(*x.shape[:-1], row_length(x.shape[-1], type_))


def expanded(rows: NDArray[np.generic], type_: str) -> NDArray[np.float32]:
    """Return stored rows (..., row_length) as float32 (..., E)."""
    if type_ == "f32":
        return rows.view(np.float32)
    of = BY_NAME[type_.upper()]
    head_dim = rows.shape[-1] * rows.itemsize // of.block_bytes * of.block_size
    values = quant.dequantize(np.ascontiguousarray(rows).view(np.uint8).reshape(-1), of)
    return values.reshape(*rows.shape[:-1], head_dim)
