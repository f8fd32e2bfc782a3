"""Rows of keys and values as a cache stores them, in NumPy: the definition that all backends follow.

A row is one head of one token. `f32` is exact; `f16` and `bf16` round to nearest even; `q8_0` has blocks of 32 numbers
along the head, in ggml's form. Attention uses the rounded values, in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.quant.types import BY_NAME

# By type: the element of a store in NumPy.
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "q8_0": np.uint8}


def default_type(activations: str) -> str:
    """Return the default type of keys and values for a type of activations: f16, bf16, else f32."""
    return activations if activations in DTYPES else "f32"


def types_text(activations: str, kv_type: str) -> str:
    """Return the types that differ from the default as ", activations i16, keys and values q8_0", for reports."""
    text = "" if activations == "f32" else f", activations {activations}"
    return text if kv_type == default_type(activations) else f"{text}, keys and values {kv_type}"


def fits(head_dim: int, type_: str) -> bool:
    """Return whether heads of this width fill whole blocks of the type."""
    return head_dim % BY_NAME[type_.upper()].block_size == 0


def row_nbytes(head_dim: int, type_: str) -> int:
    """Return the bytes of a row.

    Raises:
        ValueError: the row does not fill whole blocks.
    """
    return BY_NAME[type_.upper()].bytes_for(head_dim)


def row_length(head_dim: int, type_: str) -> int:
    """Return the elements of a row in a store of `DTYPES`."""
    return row_nbytes(head_dim, type_) // np.dtype(DTYPES[type_]).itemsize


def stored(x: NDArray[np.float32], type_: str) -> NDArray[np.generic]:
    """Round rows (..., E) to a type: (..., row_length) of the type's element."""
    if type_ == "f32":
        return x
    rows = quant.quantize(x, BY_NAME[type_.upper()]).view(DTYPES[type_])
    return rows.reshape(*x.shape[:-1], row_length(x.shape[-1], type_))


def expanded(rows: NDArray[np.generic], type_: str) -> NDArray[np.float32]:
    """Return stored rows (..., row_length) as float32 (..., E)."""
    if type_ == "f32":
        return rows.view(np.float32)
    of = BY_NAME[type_.upper()]
    row = rows.shape[-1] * rows.itemsize // of.block_bytes * of.block_size
    return quant.dequantize(np.ascontiguousarray(rows).view(np.uint8).reshape(-1), of).reshape(*rows.shape[:-1], row)
