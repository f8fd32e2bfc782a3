"""Dispatch by storage format: gemv of stored rows, expansion of rows, prefetching."""

from __future__ import annotations

from typing import Any

from kernels.cpu import float32, q4_0, q4_1, q4_k, q6_k, q8_0
from kernels.cpu.jit import jit
from kernels.cpu.layout import LINE_BYTES, PANEL_TOKENS, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, STRETCH
from kernels.cpu.memory import floats, raw
from kernels.cpu.sums import PANEL_SIZES, WIDE
from kernels.cpu.vectors import prefetch

# Bytes of scratch memory that `four_rows` and `expand` use for scales.
FORMAT_ROOM = 4 * STRETCH


# The most vectors that are multiplied with rows as they are stored. With more vectors gemm is faster: gemv dequantises
# weights once per panel, gemm once. Dequantising float32 and Q8_0 is cheap.
_MOST_SIMPLE = min(PANEL_TOKENS, 2 * PANEL_SIZES[-1] if WIDE else PANEL_SIZES[-1])
_MOST_4_BITS = PANEL_SIZES[-1]
_MOST_Q4_K = PANEL_SIZES[-1] if WIDE else 4
_MOST_Q6_K = 4
MOST_STORED = _MOST_SIMPLE


@jit
def most_stored(kind: int) -> int:
    """Return the most vectors that are multiplied with stored rows of a format: by measurement."""
    if kind == Q4_K:
        return _MOST_Q4_K
    if kind == Q6_K:
        return _MOST_Q6_K
    return _MOST_4_BITS if kind in (Q4_0, Q4_1) else _MOST_SIMPLE


@jit
def row_bytes(kind: int, n_columns: int) -> int:
    """Return the bytes of `n_columns` columns, a multiple of the block size."""
    if kind == Q8_0:
        return n_columns // q8_0.BLOCK * q8_0.BLOCK_BYTES
    if kind == Q4_0:
        return n_columns // q4_0.BLOCK * q4_0.BLOCK_BYTES
    if kind == Q4_1:
        return n_columns // q4_1.BLOCK * q4_1.BLOCK_BYTES
    if kind == Q4_K:
        return n_columns // q4_k.BLOCK * q4_k.BLOCK_BYTES
    if kind == Q6_K:
        return n_columns // q6_k.BLOCK * q6_k.BLOCK_BYTES
    return 4 * n_columns


@jit
def four_rows(
    kind: int, n_vectors: int, rows: Any, last: Any, step: int, count: int, n_columns: int, panel: Any, first: int,
    y: Any, at: int, apart: int, y_row: int, ahead: int, room: int,
) -> None:  # fmt: skip
    """`y[at + i apart + r + t y_row] += row r of range i . vector t`, for four ranges; see `rows.py` for arguments."""
    if kind == Q8_0:
        q8_0.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)
    elif kind == Q4_0:
        q4_0.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)
    elif kind == Q4_1:
        q4_1.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)
    elif kind == Q4_K:
        q4_k.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)
    elif kind == Q6_K:
        q6_k.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)
    else:
        float32.four_rows(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, room)


@jit
def expand(
    kind: int, weights: int, n_columns: int, row: int, column: int, n: int, out: Any, at: int, step: int, apart: int,
    room: int,
) -> None:  # fmt: skip
    """Write `n` weights of a row, from `column` on, to `out[at ...]` as float32; both are multiples of a block.

    Groups of 16 weights are `step` elements apart; inside a group, groups of `PART` weights are `apart` elements apart.
    With a step of 16 and `PART` apart, weights keep their order; with a step of `PART` and the size of a part apart,
    they are stored in parts (`tile.py`).

    float32 has no blocks: its weights are padded with zeros to a multiple of 16. At address `room` are `FORMAT_ROOM`
    bytes of scratch memory.
    """
    start, blocks = row * n_columns + column, raw(weights)
    first, last = start // 32, (start + n) // 32
    if kind == Q8_0:
        q8_0.dequantize(blocks, first, last, out, at, step, apart)
    elif kind == Q4_0:
        q4_0.dequantize(blocks, first, last, out, at, step, apart)
    elif kind == Q4_1:
        q4_1.dequantize(blocks, first, last, out, at, step, apart)
    elif kind == Q4_K:
        q4_k.dequantize(blocks, first // 8, last // 8, out, at, step, apart, room)
    elif kind == Q6_K:
        q6_k.dequantize(blocks, first // 8, last // 8, out, at, step, apart, room)
    else:
        float32.copy(floats(weights), start, n, out, at, step, apart)


@jit
def prefetch_weights(kind: int, weights: int, n_columns: int, row: int, column: int, n: int) -> None:
    """Prefetch the bytes that `expand` with the same arguments reads; they may be after the end of the matrix."""
    first, data = row_bytes(kind, 256) * (row * n_columns + column) // 256, raw(weights)
    for at in range(first, first + row_bytes(kind, 256) * n // 256, LINE_BYTES):
        prefetch(data, at)
