"""Q4_0 on the CPU: products of float32 vectors with the 18-byte blocks of a GGUF file, as they lie in it.

A block is a float16 scale and 32 codes of 4 bits, counted from -8: byte i has those of weights i and i + 16. Four
blocks are multiplied at a time; a row's last ones are taken more than once where there are not four, with zeros. The
NumPy twins are in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.arranged import STRETCH, arrange, divide, dot_of_4, dot_of_4_from, sum_of_4
from kernels.cpu.codes import cut, load_halves_of_4, load_uint8, load_words_of_4, right
from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, load, load_half_splat, mul, prefetch, splat, store, sub, total, zeros

BLOCK_BYTES = 18
AHEAD = 2048
# Floats that an arranged stretch takes: the elements, and what the offset of the codes adds to each lane.
ARRANGED = STRETCH + LANES


@jit
def prepare(x: Any, n: int, out: Any) -> None:
    """Arrange a vector of `n` elements for `matvec`."""
    to = 0
    for at in range(0, n, STRETCH):
        arrange(x, at, n, 16, out, to)
        store(out, to + STRETCH, mul(add(sum_of_4(out, to), sum_of_4(out, to + 64)), splat(-8.0)))
        divide(out, to)
        divide(out, to + 64)
        to += ARRANGED


@jit
def _stretch(blocks: Any, a: Any, b: Any, c: Any, d: Any, x: Any, at: Any, so_far: Any) -> Any:
    """`so_far` + the blocks at four bytes times an arranged stretch of x."""
    words = load_words_of_4(blocks, a + 2, b + 2, c + 2, d + 2)
    sums = dot_of_4_from(words, 15, x, at, load(x, at + STRETCH))
    return fma(load_halves_of_4(blocks, a, b, c, d), add(sums, dot_of_4(right(words, 4), 15, x, at + 64)), so_far)


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
    """`out[to + 32 * (b - first) ...] = d * (q - 8)` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        at = b * BLOCK_BYTES
        scale, codes, eight = load_half_splat(blocks, at), load_uint8(blocks, at + 2), splat(8.0)
        store(out, to, mul(scale, sub(cut(codes, 15), eight)))
        store(out, to + 16, mul(scale, sub(cut(right(codes, 4), 15), eight)))
        to += 32
