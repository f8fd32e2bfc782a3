"""Q4_0 on the CPU: 18-byte blocks of a GGUF file as float32 weights.

A block is a float16 scale and 32 quants of 4 bits, counted from -8: byte i has those of weights i and i + 16. A weight
is `d * (q - 8)`, which float32 holds exactly. The NumPy twins are in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import jit
from kernels.cpu.quants import load_uint8, right, scale_4_bits
from kernels.cpu.rows import four_rows as make_four_rows
from kernels.cpu.vectors import fma, load, load_half_splat, mul, splat, store

BLOCK, BLOCK_BYTES = 32, 18


@jit
def weights(blocks: Any, at: int) -> Any:
    """The 32 weights of the block at byte `at`, in two vectors."""
    scale, quants = load_half_splat(blocks, at), load_uint8(blocks, at + 2)
    offset = mul(scale, splat(8.0))
    return scale_4_bits(quants, scale, offset), scale_4_bits(right(quants, 4), scale, offset)


@jit
def add_block(blocks: Any, at: int, x: Any, column: int, sums: Any) -> Any:
    """Add the products of the block at byte `at` with x from `column` on to 16 sums."""
    low, high = weights(blocks, at)
    return fma(high, load(x, column + 16), fma(low, load(x, column), sums))


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, add_block)


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
    """`out[to + 32 * (b - first) ...] = d * (q - 8)` for blocks first to last - 1; out is float32."""
    for b in range(first, last):
        low, high = weights(blocks, b * BLOCK_BYTES)
        store(out, to, low)
        store(out, to + 16, high)
        to += BLOCK
