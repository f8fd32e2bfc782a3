"""The formats that matrices are stored in, by number: what a task needs of each, products and expanded rows."""

from __future__ import annotations

from typing import Any

from kernels.cpu import float32, q8_0
from kernels.cpu.jit import jit
from kernels.cpu.memory import floats, raw

F32, Q8_0 = 0, 1


@jit
def matvec(kind: int, weights: int, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of the matrix at address `weights`."""
    if kind == Q8_0:
        q8_0.matvec(raw(weights), n_columns, x, y, first, last)
    else:
        float32.matvec(floats(weights), n_columns, x, y, first, last)


@jit
def expand(kind: int, weights: int, n_columns: int, row: int, column: int, n: int, out: Any, at: int) -> None:
    """`out[at ...] =` the `n` weights of a row from a column on; for blocks both are multiples of 32."""
    if kind == Q8_0:
        first = (row * n_columns + column) // 32
        q8_0.dequantize(raw(weights), first, first + n // 32, out, at)
    else:
        source = floats(weights)
        for i in range(n):
            out[at + i] = source[row * n_columns + column + i]
