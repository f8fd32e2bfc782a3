"""Q8_0 on the CPU: 34-byte blocks of a GGUF file as float32 weights.

A block is a float16 scale and 32 signed bytes; a weight is their product, which float32 holds exactly. Blocks are not
aligned, and nothing is copied. The NumPy twins are in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import jit
from kernels.cpu.rows import four_rows as make_four_rows
from kernels.cpu.vectors import fma, load, load_half_splat, load_int8, mul, store

BLOCK, BLOCK_BYTES = 32, 34


@jit
def weights(blocks: Any, at: int) -> Any:
    """The 32 weights of the block at byte `at`, in two vectors."""
    scale = load_half_splat(blocks, at)
    return mul(scale, load_int8(blocks, at + 2)), mul(scale, load_int8(blocks, at + 18))


@jit
def add_block(blocks: Any, at: int, x: Any, column: int, sums: Any) -> Any:
    """Add the products of the block at byte `at` with x from `column` on to 16 sums."""
    low, high = weights(blocks, at)
    return fma(high, load(x, column + 16), fma(low, load(x, column), sums))


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, add_block)


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 32 * (b - first) ...] = d * q` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        low, high = weights(blocks, b * BLOCK_BYTES)
        store(out, to, low)
        store(out, to + 16, high)
        to += BLOCK
