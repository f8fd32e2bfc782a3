"""A norm of rows, a sum of rows, or both: `residual + norm(x)`. The backend's definition in NumPy is the twin."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import entry, jit
from ..build.memory import floats, number, words
from ..build.vectors import get, put
from .norms import norm


@jit
def norm_rows(x: Any, n_rows: int, width: int, weight: int, bias: int, eps: Any, out: Any) -> None:
    """Norm contiguous rows; out may be x."""
    for t in range(n_rows):
        norm(x, t * width, width, weight, bias, eps, out, t * width)


@jit
def norm_add_to(of: int, n_rows: int, width: int, x: int, residual: int, out: int) -> None:
    """Write `residual + norm(x)`.

    At address `of` are the norm's words: its weight, its eps and its bias or 0; 0 is no norm. The residual may be 0,
    too, for nothing that is added.
    """
    y, added = floats(out), floats(residual)
    if of != 0:
        words_of = words(of)
        norm_rows(floats(x), n_rows, width, words_of[0], words_of[2], np.float32(number(words_of[1])), y)
    else:
        for i in range(n_rows * width):
            put(y, i, get(floats(x), i))
    if residual != 0:
        for i in range(n_rows * width):
            put(y, i, get(added, i) + get(y, i))


@entry
def norm_add(address: int, of: int, n_rows: int, width: int, x: int, residual: int, out: int) -> None:
    """Write `residual + norm(x)` of contiguous rows, in one thread.

    Args:
        address: address of the pool's control block.
        of: address of the norm's words; 0 for none.
        n_rows: number of rows.
        width: their width.
        x: address of the rows.
        residual: address of what is added, of the same shape; 0 for nothing.
        out: address of the result, other than the inputs.
    """
    norm_add_to(of, n_rows, width, x, residual, out)
