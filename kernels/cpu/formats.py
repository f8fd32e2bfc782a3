"""The formats that matrices are stored in, by number: what a task needs of each, products and expanded rows."""

from __future__ import annotations

from typing import Any

from kernels.cpu import float32, q8_0
from kernels.cpu.jit import jit
from kernels.cpu.layout import Q8_0
from kernels.cpu.memory import floats, raw
from kernels.cpu.vectors import get, prefetch, put

# Bytes that memory is asked for at a time.
LINE = 64


@jit
def matvec(kind: int, weights: int, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of the matrix at address `weights`."""
    if kind == Q8_0:
        q8_0.matvec(raw(weights), n_columns, x, y, first, last)
    else:
        float32.matvec(floats(weights), n_columns, x, y, first, last)


@jit
def matvecs(kind: int, weights: int, n_columns: int, n: int, x: int, y: int, y_row: int, first: int, last: int) -> None:
    """`matvec` for `n` vectors at addresses x and y: those of x lie one behind the other, those of y `y_row` apart."""
    t = 0
    if kind == Q8_0:
        while t + 4 <= n:
            inputs, outputs = floats(x + 4 * t * n_columns), floats(y + 4 * t * y_row)
            q8_0.matvec_4(raw(weights), n_columns, inputs, outputs, y_row, first, last)
            t += 4
    while t < n:
        matvec(kind, weights, n_columns, floats(x + 4 * t * n_columns), floats(y + 4 * t * y_row), first, last)
        t += 1


@jit
def expand(kind: int, weights: int, n_columns: int, row: int, column: int, n: int, out: Any, at: int) -> None:
    """`out[at ...] =` the `n` weights of a row from a column on; for blocks both are multiples of 32."""
    if kind == Q8_0:
        first = (row * n_columns + column) // 32
        q8_0.dequantize(raw(weights), first, first + n // 32, out, at)
    else:
        source = floats(weights)
        for i in range(n):
            put(out, at + i, get(source, row * n_columns + column + i))


@jit
def ask_for(kind: int, weights: int, n_columns: int, row: int, column: int, n: int) -> None:
    """Ask memory for what `expand` with the same arguments will read; it may lie behind the end."""
    first = row * n_columns + column
    bytes_ = raw(weights)
    if kind == Q8_0:
        for at in range(first // 32 * q8_0.BLOCK_BYTES, (first + n) // 32 * q8_0.BLOCK_BYTES, LINE):
            prefetch(bytes_, at)
