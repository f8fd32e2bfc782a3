"""CPU kernels of the format Q6_K: unpack 210-byte blocks of a GGUF file to float32 weights.

A block is 128 bytes with the low four bits of 256 quants q, 64 bytes with the high two bits, 16 signed 8-bit scales and
their float16 factor d. Each half of a block, 128 weights, has 64 bytes of low bits and 32 bytes of high bits. Of the 64
bytes, the low four bits belong to the first 64 weights, the high four bits to the last 64. Byte i of the 32 bytes has,
from its lowest bits up, the high bits of weights i, 32 + i, 64 + i and 96 + i. A weight is `(d * scale) * (q - 32)`,
exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import inlined, jit
from ..build.vectors import load_half_splat, load_int8, load_splat, mul
from .fixed_rows import (
    SIX_BITS_OF_128,
    eight_rows_by_parts,
    halves_of_rows,
    put_four_scales,
    words_of_rows,
)
from .panels import HALVES, in_halves, panel_by_parts
from .quants import (
    both,
    bytes_minus,
    either,
    floats_of_bytes,
    left,
    load_words,
    load_words_of_4,
    right,
    second_right,
)
from .rows import dequantize_by_parts, four_rows_by_parts

BLOCK, BLOCK_BYTES, MOST = 256, 210, 4
# Byte offsets in a block: high bits, scales, and the factor of the scales.
HIGH, SCALES, FACTOR = 128, 192, 208


@jit
def scales_of(blocks: Any, at: int) -> Any:
    """Return the 16 products `d * scale` of the block at byte `at`."""
    return mul(load_int8(blocks, at + SCALES), load_half_splat(blocks, at + FACTOR))


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return `q - 32` of weights 64 p to 64 p + 63 of the block at byte `at`: signed bytes, in a vector of 16 words."""
    half, shift = p // 2, 4 * (p % 2)
    low, bits = load_words(blocks, at + 64 * half), at + HIGH + 32 * half
    # From bit `shift` on, each byte of high bits has two bits of one of the first 32 of these 64 quants, then two bits
    # of one of the last 32. So the 32 bytes are loaded twice, and the second copy is shifted right by two more bits.
    high = second_right(load_words_of_4(blocks, bits, bits + 16, bits, bits + 16), 2)
    high = left(both(right(high, shift), 0x03030303), 4)
    return bytes_minus(either(both(right(low, shift), 0x0F0F0F0F), high), 32)


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at`, in four vectors.

    The 16 products `d * scale` of the block begin at `scales[i]`.
    """
    q = quants(blocks, at, p)
    i += 4 * p
    return (
        mul(load_splat(scales, i), floats_of_bytes(q, 0)),
        mul(load_splat(scales, i + 1), floats_of_bytes(q, 1)),
        mul(load_splat(scales, i + 2), floats_of_bytes(q, 2)),
        mul(load_splat(scales, i + 3), floats_of_bytes(q, 3)),
    )


four_rows = four_rows_by_parts(BLOCK_BYTES, scales_of, part)
dequantize = dequantize_by_parts(BLOCK_BYTES, scales_of, part)

panel = panel_by_parts(BLOCK_BYTES, scales_of, in_halves(quants), range(16), kind=HALVES)


@inlined
def put_scales(to: int, rows: Any, at: int) -> None:
    """For the block at byte `at` of each of 8 rows, write the 16 products `d * scale` to address `to`.

    Product 0 of all rows is written first, then product 1 of all rows, and so on.
    """
    first, second, third, fourth = words_of_rows(rows, at + SCALES)
    factor = halves_of_rows(rows, at + FACTOR)
    put_four_scales(to, first, factor)
    put_four_scales(to + 128, second, factor)
    put_four_scales(to + 256, third, factor)
    put_four_scales(to + 384, fourth, factor)


@jit
def parts(p: int) -> Any:
    """Return the byte offsets of quants 128 p to 128 p + 127: four 16-byte parts of low bits, then two of high bits."""
    low, high = 64 * p, HIGH + 32 * p
    return low, low + 16, low + 32, low + 48, high, high + 16


eight_rows = eight_rows_by_parts(BLOCK_BYTES, put_scales, parts, SIX_BITS_OF_128, HALVES, minus=32)
