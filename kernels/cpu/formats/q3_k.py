"""CPU kernels of the format Q3_K: unpack 110-byte blocks of a GGUF file to float32 weights.

A block has 256 quants q of 3 bits: 32 bytes with their third (high) bits, 64 bytes with their low two bits, 12 bytes
with 16 scales of 6 bits (one per 16 quants), and a float16 factor d. Bit j of byte i of the 32 bytes is the third bit
of quant 32 j + i. The low two bits of each 128 quants take 32 bytes: bits 2 j and 2 j + 1 of byte i belong to quant
32 j + i of the 128. A weight is `(d * (scale - 32)) * (q - 4)`, exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_half_splat, load_splat, mul
from .fixed_rows import eight_rows_by_parts, scales_of_rows
from .format import ONE_PANEL
from .panels import HALVES, in_halves, panel_by_parts
from .quants import (
    Field,
    both,
    bytes_minus,
    either,
    floats_of_bytes,
    left,
    load_fields,
    load_words_of_4,
    right,
    second_right,
)
from .rows import dequantize_by_parts, four_rows_by_parts
from .sums import WIDE

BLOCK, BLOCK_BYTES, MOST = 256, 110, ONE_PANEL if WIDE else 4
# Byte offsets in a block: low bits, scales, and the factor of the scales. The third bits are at offset 0.
LOW, SCALES, FACTOR = 32, 96, 108

_load_scales = load_fields(
    12,
    -32,
    Field([i % 8 for i in range(16)], [4 * (i // 8) for i in range(16)], 15),
    Field([8 + i % 4 for i in range(16)], [2 * (i // 4) for i in range(16)], 3, 4),
)


@jit
def scales_of(blocks: Any, at: int) -> Any:
    """Return the 16 products `d * (scale - 32)` of the block at byte `at`."""
    return mul(_load_scales(blocks, at + SCALES), load_half_splat(blocks, at + FACTOR))


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return `q - 4` of weights 64 p to 64 p + 63 of the block at byte `at`: signed bytes, four per 32-bit word."""
    bits = at + LOW + 32 * (p // 2)
    low = second_right(load_words_of_4(blocks, bits, bits + 16, bits, bits + 16), 2)
    low = both(right(low, 4 * (p % 2)), 0x03030303)
    # In each of the block's first 32 bytes, bit 2 p belongs to one of the first 32 of these 64 quants, bit 2 p + 1 to
    # one of the last 32.
    third = second_right(load_words_of_4(blocks, at, at + 16, at, at + 16), 1)
    third = left(both(right(third, 2 * p), 0x01010101), 2)
    return bytes_minus(either(low, third), 4)


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at` in four vectors.

    The block's products `d * (scale - 32)` begin at `scales[i]`.
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
eight_rows = eight_rows_by_parts(BLOCK_BYTES, scales_of_rows(scales_of), in_halves(quants), kind=HALVES)
