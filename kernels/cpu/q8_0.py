"""Q8_0 on the CPU: products of float32 vectors with the 34-byte blocks of a GGUF file, as they lie in it.

A block is a float16 scale and 32 signed bytes; blocks are not aligned, and nothing is copied. Activations stay
float32. Each kernel has its NumPy twin under the same name in `q8_0_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import jit
from kernels.cpu.vectors import add, fma, load, load_half_splat, load_int8, mul, prefetch, store, total, zeros

BLOCK_BYTES = 34
# How far ahead of the multiplications memory is asked for: for rows in order, flat between 1 and 4 KB when measured;
# for rows of several stretches, which the processor itself follows better.
AHEAD, AHEAD_OF_EACH = 2048, 1024


@jit
def _term(blocks: Any, at: Any, x: Any, column: Any, so_far: Any) -> Any:
    """`so_far` + the block at byte `at` times 32 of x: both halves summed first, then scaled."""
    products = mul(load_int8(blocks, at + 2), load(x, column))
    products = fma(load_int8(blocks, at + 18), load(x, column + 16), products)
    return fma(load_half_splat(blocks, at), products, so_far)


@jit
def matvec(blocks: Any, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of a matrix of `n_columns`; x and y are float32.

    Two sums per row, of the even and the odd blocks, so that one multiplication need not wait for the other.
    """
    n_blocks = n_columns // 32
    row_bytes = n_blocks * BLOCK_BYTES
    for r in range(first, last):
        at = r * row_bytes
        even, odd = zeros(), zeros()
        for b in range(0, n_blocks - 1, 2):
            prefetch(blocks, at + AHEAD)
            even = _term(blocks, at, x, 32 * b, even)
            odd = _term(blocks, at + BLOCK_BYTES, x, 32 * b + 32, odd)
            at += 2 * BLOCK_BYTES
        if n_blocks % 2:
            even = _term(blocks, at, x, 32 * (n_blocks - 1), even)
        y[r] = total(add(even, odd))


@jit
def four_rows(a: Any, b: Any, c: Any, d: Any, n_columns: int, x: Any, y: Any, at: int, apart: int) -> None:
    """`y[at + i * apart] = row . x` for four rows, which lie apart; x and y are float32.

    Block by block of each in turns: memory is read at four places at once, and each element of x once for all.
    """
    i = 0
    sum_a, sum_b, sum_c, sum_d = zeros(), zeros(), zeros(), zeros()
    for column in range(0, n_columns, 32):
        prefetch(a, i + AHEAD_OF_EACH)
        prefetch(b, i + AHEAD_OF_EACH)
        prefetch(c, i + AHEAD_OF_EACH)
        prefetch(d, i + AHEAD_OF_EACH)
        sum_a, sum_b = _term(a, i, x, column, sum_a), _term(b, i, x, column, sum_b)
        sum_c, sum_d = _term(c, i, x, column, sum_c), _term(d, i, x, column, sum_d)
        i += BLOCK_BYTES
    y[at], y[at + apart] = total(sum_a), total(sum_b)
    y[at + 2 * apart], y[at + 3 * apart] = total(sum_c), total(sum_d)


@jit
def matvec_4(blocks: Any, n_columns: int, x: Any, y: Any, y_row: int, first: int, last: int) -> None:
    """`y[v * y_row + r] = row r . x[v]` for four vectors that follow each other in x: weights are widened once."""
    n_blocks = n_columns // 32
    for r in range(first, last):
        at = r * n_blocks * BLOCK_BYTES
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        for i in range(0, n_columns, 32):
            prefetch(blocks, at + AHEAD)
            low, high, scale = load_int8(blocks, at + 2), load_int8(blocks, at + 18), load_half_splat(blocks, at)
            j, k, m = i + n_columns, i + 2 * n_columns, i + 3 * n_columns
            a = fma(scale, fma(high, load(x, i + 16), mul(low, load(x, i))), a)
            b = fma(scale, fma(high, load(x, j + 16), mul(low, load(x, j))), b)
            c = fma(scale, fma(high, load(x, k + 16), mul(low, load(x, k))), c)
            d = fma(scale, fma(high, load(x, m + 16), mul(low, load(x, m))), d)
            at += BLOCK_BYTES
        y[r], y[y_row + r], y[2 * y_row + r], y[3 * y_row + r] = total(a), total(b), total(c), total(d)


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 32 * (b - first) ...] = d * q` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        at = b * BLOCK_BYTES
        scale = load_half_splat(blocks, at)
        store(out, to, mul(scale, load_int8(blocks, at + 2)))
        store(out, to + 16, mul(scale, load_int8(blocks, at + 18)))
        to += 32
