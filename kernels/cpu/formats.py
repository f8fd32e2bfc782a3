"""The formats that matrices are stored in, by number: what a task needs of each, products and expanded rows."""

from __future__ import annotations

from typing import Any

from kernels.cpu import float32, q4_0, q4_1, q4_k, q6_k, q8_0
from kernels.cpu.jit import jit
from kernels.cpu.layout import F32, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0
from kernels.cpu.memory import floats, raw
from kernels.cpu.vectors import get, prefetch, put

# Bytes that memory is asked for at a time.
LINE = 64


@jit
def matvecs(
    kind: int, weights: int, n_columns: int, n: int, x: int, y: int, y_row: int, first: int, last: int, room: int
) -> None:
    """`y[t, r] = row r . x[t]` for rows first to last - 1 of the matrix at address `weights`, and `n` vectors.

    Those at address x lie one behind the other, those at address y are `y_row` apart. `room` is the address of memory
    for a vector in another order, up to 6 bytes per column and 1 KiB.
    """
    t = 0
    if kind == Q8_0:
        while t + 4 <= n:
            inputs, outputs = floats(x + 4 * t * n_columns), floats(y + 4 * t * y_row)
            q8_0.matvec_4(raw(weights), n_columns, inputs, outputs, y_row, first, last)
            t += 4
    while t < n:
        _matvec(kind, weights, n_columns, x + 4 * t * n_columns, floats(y + 4 * t * y_row), first, last, floats(room))
        t += 1


@jit
def _matvec(kind: int, weights: int, n_columns: int, x: int, y: Any, first: int, last: int, room: Any) -> None:
    """One vector."""
    blocks, source = raw(weights), floats(x)
    if kind == Q8_0:
        q8_0.matvec(blocks, n_columns, source, y, first, last)
    elif kind == Q4_0:
        q4_0.prepare(source, n_columns, room)
        q4_0.matvec(blocks, n_columns, room, y, first, last)
    elif kind == Q4_1:
        q4_1.prepare(source, n_columns, room)
        q4_1.matvec(blocks, n_columns, room, y, first, last)
    elif kind == Q4_K:
        q4_k.prepare(source, n_columns, room)
        q4_k.matvec(blocks, n_columns, room, y, first, last)
    elif kind == Q6_K:
        q6_k.prepare(source, n_columns, room)
        q6_k.matvec(blocks, n_columns, room, y, first, last)
    else:
        float32.matvec(floats(weights), n_columns, source, y, first, last)


@jit
def has_four_rows(kind: int) -> bool:
    """Whether products with one vector wait for memory rather than for arithmetic: for these there is `four_rows`."""
    return kind in (Q8_0, F32)


@jit
def four_rows(kind: int, n_columns: int, a: int, b: int, c: int, d: int, x: int, y: Any, at: int, apart: int) -> None:
    """`y[at + i * apart] = row . x` for the rows at four addresses, of a format that has it."""
    if kind == Q8_0:
        q8_0.four_rows(raw(a), raw(b), raw(c), raw(d), n_columns, floats(x), y, at, apart)
    else:
        float32.four_rows(floats(a), floats(b), floats(c), floats(d), n_columns, floats(x), y, at, apart)


@jit
def row_bytes(kind: int, n_columns: int) -> int:
    """Bytes of a row of such a format."""
    return n_columns // 32 * q8_0.BLOCK_BYTES if kind == Q8_0 else 4 * n_columns


@jit
def expand(kind: int, weights: int, n_columns: int, row: int, column: int, n: int, out: Any, at: int) -> None:
    """`out[at ...] =` the `n` weights of a row from a column on; both are multiples of a block."""
    start, blocks = row * n_columns + column, raw(weights)
    first, last = start // 32, (start + n) // 32
    if kind == Q8_0:
        q8_0.dequantize(blocks, first, last, out, at)
    elif kind == Q4_0:
        q4_0.dequantize(blocks, first, last, out, at)
    elif kind == Q4_1:
        q4_1.dequantize(blocks, first, last, out, at)
    elif kind == Q4_K:
        q4_k.dequantize(blocks, first // 8, last // 8, out, at)
    elif kind == Q6_K:
        q6_k.dequantize(blocks, first // 8, last // 8, out, at)
    else:
        source = floats(weights)
        for i in range(n):
            put(out, at + i, get(source, start + i))


@jit
def ask_for(kind: int, weights: int, n_columns: int, row: int, column: int, n: int) -> None:
    """Ask memory for what `expand` with the same arguments will read; it may lie behind the end."""
    per_256 = 0
    if kind == Q8_0:
        per_256 = 8 * q8_0.BLOCK_BYTES
    elif kind == Q4_0:
        per_256 = 8 * q4_0.BLOCK_BYTES
    elif kind == Q4_1:
        per_256 = 8 * q4_1.BLOCK_BYTES
    elif kind == Q4_K:
        per_256 = q4_k.BLOCK_BYTES
    elif kind == Q6_K:
        per_256 = q6_k.BLOCK_BYTES
    first, bytes_ = row * n_columns + column, raw(weights)
    for at in range(first * per_256 // 256, (first + n) * per_256 // 256, LINE):
        prefetch(bytes_, at)
