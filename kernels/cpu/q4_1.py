"""Q4_1 on the CPU: products of float32 vectors with the 20-byte blocks of a GGUF file, as they lie in it.

A block is a float16 scale, a float16 minimum and 32 codes of 4 bits, in the order of Q4_0's. The NumPy twins are in
`blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.arranged import STRETCH, arrange, divide, dot_of_4, dot_of_4_from, sum_of_4
from kernels.cpu.codes import cut, load_halves_of_4, load_uint8, load_words_of_4, right
from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, load, load_half_splat, mul, prefetch, store, total, zeros

BLOCK_BYTES = 20
AHEAD = 2048
# Floats that an arranged stretch takes: the elements, and what the minima are multiplied with in each lane.
ARRANGED = STRETCH + LANES


@jit
def prepare(x: Any, n: int, out: Any) -> None:
    """Arrange a vector of `n` elements for `matvec`."""
    to = 0
    for at in range(0, n, STRETCH):
        arrange(x, at, n, 16, out, to)
        store(out, to + STRETCH, add(sum_of_4(out, to), sum_of_4(out, to + 64)))
        divide(out, to)
        divide(out, to + 64)
        to += ARRANGED


@jit
def _stretch(blocks: Any, a: Any, b: Any, c: Any, d: Any, x: Any, at: Any, so_far: Any) -> Any:
    """`so_far` + the blocks at four bytes times an arranged stretch of x."""
    words = load_words_of_4(blocks, a + 4, b + 4, c + 4, d + 4)
    sums = dot_of_4_from(right(words, 4), 15, x, at + 64, dot_of_4(words, 15, x, at))
    so_far = fma(load_halves_of_4(blocks, a + 2, b + 2, c + 2, d + 2), load(x, at + STRETCH), so_far)
    return fma(load_halves_of_4(blocks, a, b, c, d), sums, so_far)


@jit
def matvec(blocks: Any, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of a matrix of `n_columns`; x is prepared."""
    row_bytes = n_columns // 32 * BLOCK_BYTES
    for r in range(first, last):
        at, x_at, sums = r * row_bytes, 0, zeros()
        end = at + row_bytes
        while at + 4 * BLOCK_BYTES <= end:
            prefetch(blocks, at + AHEAD)
            a, b, c = at + BLOCK_BYTES, at + 2 * BLOCK_BYTES, at + 3 * BLOCK_BYTES
            sums = _stretch(blocks, at, a, b, c, x, x_at, sums)
            at += 4 * BLOCK_BYTES
            x_at += ARRANGED
        if at < end:
            b, c = min(at + BLOCK_BYTES, end - BLOCK_BYTES), min(at + 2 * BLOCK_BYTES, end - BLOCK_BYTES)
            sums = _stretch(blocks, at, b, c, end - BLOCK_BYTES, x, x_at, sums)
        y[r] = total(sums)


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 32 * (b - first) ...] = d * q + m` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        at = b * BLOCK_BYTES
        scale, minimum, codes = load_half_splat(blocks, at), load_half_splat(blocks, at + 2), load_uint8(blocks, at + 4)
        store(out, to, add(mul(scale, cut(codes, 15)), minimum))
        store(out, to + 16, add(mul(scale, cut(right(codes, 4), 15)), minimum))
        to += 32
