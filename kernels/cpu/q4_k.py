"""Q4_K on the CPU: products of float32 vectors with the 144-byte blocks of a GGUF file, as they lie in it.

A block is two float16 factors, of the scales and of the minima, 12 bytes with 8 of each, and 256 codes of 4 bits: each 32
bytes have two groups of 32 weights, the first in their low halves. The NumPy twins are in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.arranged import STRETCH, arrange, divide, dot_of_4, sum_of_32
from kernels.cpu.codes import cut, lane, load_halves_of_4, load_scales_of_6, load_uint8, load_words, right, spread
from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, load, mul, prefetch, put, splat, store, sub, total, zeros

BLOCK_BYTES, BLOCK = 144, 256
AHEAD = 2048
# Floats that the arranged elements of a block take: two stretches, and what scales and minima are multiplied with: 0
# and the sums of the 8 groups, of which the minima are taken off.
ARRANGED = BLOCK + LANES


@jit
def prepare(x: Any, n: int, out: Any) -> None:
    """Arrange a vector of `n` elements for `matvec`."""
    to = 0
    for at in range(0, n, BLOCK):
        for half in range(0, BLOCK, STRETCH):
            arrange(x, at + half, n, 32, out, to + half)
            divide(out, to + half)
            divide(out, to + half + 64)
        for group in range(8):
            put(out, to + BLOCK + group, np.float32(0))
            put(out, to + BLOCK + 8 + group, -sum_of_32(x, at + 32 * group))
        to += ARRANGED


@jit
def _scales(blocks: Any, at: Any) -> Any:
    """The 8 scales and 8 minima of the block at a byte."""
    return mul(load_scales_of_6(blocks, at + 4), load_halves_of_4(blocks, at, at, at + 2, at + 2))


@jit
def matvec(blocks: Any, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of a matrix of `n_columns`; x is prepared."""
    n_blocks = n_columns // BLOCK
    for r in range(first, last):
        at, x_at = r * n_blocks * BLOCK_BYTES, 0
        low, high = zeros(), zeros()
        for _ in range(n_blocks):
            prefetch(blocks, at + AHEAD)
            prefetch(blocks, at + AHEAD + 64)
            scales = _scales(blocks, at)
            words = load_words(blocks, at + 16)
            low = fma(spread(scales, 0, 2, 8), dot_of_4(words, 15, x, x_at), low)
            high = fma(spread(scales, 1, 2, 8), dot_of_4(right(words, 4), 15, x, x_at + 64), high)
            words = load_words(blocks, at + 80)
            low = fma(spread(scales, 4, 2, 8), dot_of_4(words, 15, x, x_at + 128), low)
            high = fma(spread(scales, 5, 2, 8), dot_of_4(right(words, 4), 15, x, x_at + 192), high)
            low = fma(scales, load(x, x_at + BLOCK), low)
            at += BLOCK_BYTES
            x_at += ARRANGED
        y[r] = total(add(low, high))


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 256 * (b - first) ...] = scale * q - minimum` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        at = b * BLOCK_BYTES
        scales = _scales(blocks, at)
        for group in range(8):
            scale, minimum = splat(lane(scales, group)), splat(lane(scales, group + 8))
            for i in range(0, 32, LANES):
                codes = right(load_uint8(blocks, at + 16 + group // 2 * 32 + i), group % 2 * 4)
                store(out, to + 32 * group + i, sub(mul(scale, cut(codes, 15)), minimum))
        to += BLOCK
