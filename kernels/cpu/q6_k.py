"""Q6_K on the CPU: products of float32 vectors with the 210-byte blocks of a GGUF file, as they lie in it.

A block is 128 bytes with the low four bits of 256 codes, 64 with their high two, 16 signed 8-bit scales and a float16
factor of these; codes are counted from -32. Each half of a block has 64 bytes of low bits, whose low halves belong to its first 64
weights, and 32 bytes of high bits, two for each 32 weights. The NumPy twins are in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.arranged import STRETCH, arrange, divide, dot_of_4_from, sum_of_4
from kernels.cpu.codes import both, cut, either, lane, left, load_uint8, load_words, load_words_of_4, right, second_right_2, spread
from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, load, load_half_splat, load_int8, mul, prefetch, splat, store, sub, total, zeros

BLOCK_BYTES, BLOCK = 210, 256
AHEAD = 2048
# Where a half's high bits lie in a block, and the scales, and their factor.
HIGH, SCALES, FACTOR = 128, 192, 208
# Floats that an arranged half of a block takes: the elements, and what the offset of the codes adds to each lane.
ARRANGED = STRETCH + 2 * LANES


@jit
def prepare(x: Any, n: int, out: Any) -> None:
    """Arrange a vector of `n` elements for `matvec`."""
    to = 0
    for at in range(0, n, STRETCH):
        arrange(x, at, n, 64, out, to)
        for half in range(2):
            store(out, to + STRETCH + LANES * half, mul(sum_of_4(out, to + 64 * half), splat(-32.0)))
            divide(out, to + 64 * half)
        to += ARRANGED


@jit
def _codes(blocks: Any, at: Any, high_at: Any) -> Any:
    """The codes of half a block, one per byte: of its first 64 weights, and of its last 64."""
    low, high = load_words(blocks, at), load_words_of_4(blocks, high_at, high_at + 16, high_at, high_at + 16)
    # Of each byte of high bits the first 8 lanes want the bits 0 and 1, then 4 and 5; the last 8 lanes those above.
    high = second_right_2(high)
    return (
        either(both(low, 0x0F0F0F0F), left(both(high, 0x03030303), 4)),
        either(both(right(low, 4), 0x0F0F0F0F), both(high, 0x30303030)),
    )


@jit
def matvec(blocks: Any, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of a matrix of `n_columns`; x is prepared."""
    n_blocks = n_columns // BLOCK
    for r in range(first, last):
        at, x_at = r * n_blocks * BLOCK_BYTES, 0
        a, b = zeros(), zeros()
        for _ in range(n_blocks):
            prefetch(blocks, at + AHEAD)
            prefetch(blocks, at + AHEAD + 64)
            prefetch(blocks, at + AHEAD + 128)
            scales = mul(load_int8(blocks, at + SCALES), load_half_splat(blocks, at + FACTOR))
            low, high = _codes(blocks, at, at + HIGH)
            a = fma(spread(scales, 0, 1, 4), dot_of_4_from(low, 63, x, x_at, load(x, x_at + 128)), a)
            b = fma(spread(scales, 4, 1, 4), dot_of_4_from(high, 63, x, x_at + 64, load(x, x_at + 144)), b)
            x_at += ARRANGED
            low, high = _codes(blocks, at + 64, at + HIGH + 32)
            a = fma(spread(scales, 8, 1, 4), dot_of_4_from(low, 63, x, x_at, load(x, x_at + 128)), a)
            b = fma(spread(scales, 12, 1, 4), dot_of_4_from(high, 63, x, x_at + 64, load(x, x_at + 144)), b)
            x_at += ARRANGED
            at += BLOCK_BYTES
        y[r] = total(add(a, b))


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 256 * (b - first) ...] = scale * (q - 32)` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        at = b * BLOCK_BYTES
        scales = mul(load_int8(blocks, at + SCALES), load_half_splat(blocks, at + FACTOR))
        for group in range(BLOCK // LANES):
            half, i = group // 8, group % 8
            # 16 codes: their low bits lie in 16 of 64 bytes, their high ones in 16 of 32.
            low = right(load_uint8(blocks, at + 64 * half + i % 4 * LANES), i // 4 * 4)
            high = right(load_uint8(blocks, at + HIGH + 32 * half + i % 2 * LANES), i // 2 * 2)
            codes = cut(either(both(low, 15), left(both(high, 3), 4)), 63)
            store(out, to + LANES * group, mul(splat(lane(scales, group)), sub(codes, splat(32.0))))
        to += BLOCK
