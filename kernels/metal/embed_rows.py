"""Embedding lookup in a quantised table.

The token ids are an array on the GPU, so a forward pass can begin before the host has read the previous pass's token.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import Size, launch
from .layout import StoredMatrix, described, expanded
from .reference import Expected

KERNEL = Kernel.load("embed_rows", ["ids", "wq", "ws"], ["y"])
THREADS = 64


def grid(tokens: int, n_columns: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: thread (i, t) writes columns 16 i to 16 i + 15 of output row t."""
    return (-(-n_columns // (16 * THREADS)) * THREADS, tokens, 1), (THREADS, 1, 1)


def embed_rows(table: StoredMatrix, ids: mx.array) -> mx.array:
    """Return the rows `ids` of a table (N, K), as float32 (T, K).

    The weights are bit-identical to those that the format defines.

    `ids` is (T,) int32. Its values are not checked; the row of an invalid id is NaN.

    Raises:
        ValueError: the ids are not (T,) int32, or T is 0.
    """
    if ids.ndim != 1 or not ids.size or ids.dtype != mx.int32:
        raise ValueError(f"embed_rows: expected ids (T,) of int32, found {described(ids)}")
    N, K = table.shape
    T = ids.size
    threads, group = grid(T, K)
    (y,) = launch(
        KERNEL,
        [ids, *table.inputs],
        template=(("W", table.layout.code), ("N", N), ("K", K)),
        grid=threads,
        threadgroup=group,
        output_shapes=[(T, K)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(table: StoredMatrix, ids: mx.array) -> Expected:
    """Return the expected rows; the kernel's rows must be bit-identical."""
    wanted = np.array(ids)
    known = (wanted >= 0) & (wanted < table.shape[0])
    rows = np.where(known[:, None], expanded(table)[np.where(known, wanted, 0)], np.nan)
    return Expected(rows, np.zeros(rows.shape))
