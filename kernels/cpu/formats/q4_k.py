"""CPU kernels of the format Q4_K: unpack 144-byte blocks of a GGUF file to float32 weights.

A block is two float16 factors (d for scales and dmin for minima), 12 bytes with 8 scales and 8 minima of 6 bits, and
256 quants q of 4 bits. Each 32 bytes of quants belong to two groups of 32 weights: the low four bits of each byte to
the first group, the high four bits to the second. A weight is `(d * scale) * q - dmin * minimum`; both products are
exact, so the difference is rounded once.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_splat, mul
from .fixed_rows import NIBBLES_OF_64, eight_rows_by_parts, put_scales_of_6
from .format import ONE_PANEL
from .panels import BIASED, in_halves, panel_by_parts
from .quants import (
    both,
    load_halves_of_4,
    load_scales_of_6,
    load_uint8,
    load_words_of_4,
    right,
    scale_4_bits,
    second_right,
)
from .rows import dequantize_by_parts, four_rows_by_parts
from .sums import WIDE

BLOCK, BLOCK_BYTES, MOST = 256, 144, ONE_PANEL if WIDE else 4
# The byte offset of the quants in a block.
QUANTS = 16
# For each group of 32 weights, the index of its scale in the result of `load_scales_of_6`; the index of its minimum is
# 4 larger.
PLACES = (0, 1, 2, 3, 8, 9, 10, 11)


@jit
def scales_of(blocks: Any, at: int) -> Any:
    """Return the products `d * scale` and `dmin * minimum` of the block at byte `at`, in the lanes of `PLACES`."""
    return mul(load_scales_of_6(blocks, at + 4), load_halves_of_4(blocks, at, at + 2, at, at + 2))


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at` in four vectors.

    The result of `scales_of` for this block begins at `scales[i]`.
    """
    first, second = load_uint8(blocks, at + QUANTS + 32 * p), load_uint8(blocks, at + QUANTS + 32 * p + 16)
    i += 8 * (p // 2) + 2 * (p % 2)
    scale, minimum = load_splat(scales, i), load_splat(scales, i + 4)
    next_scale, next_minimum = load_splat(scales, i + 1), load_splat(scales, i + 5)
    return (
        scale_4_bits(first, scale, minimum),
        scale_4_bits(second, scale, minimum),
        scale_4_bits(right(first, 4), next_scale, next_minimum),
        scale_4_bits(right(second, 4), next_scale, next_minimum),
    )


four_rows = four_rows_by_parts(BLOCK_BYTES, scales_of, part)
dequantize = dequantize_by_parts(BLOCK_BYTES, scales_of, part)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return quants 64 p to 64 p + 63 of the block at byte `at`: 64 bytes, in a vector of 16 words."""
    low = at + QUANTS + 32 * p
    return both(second_right(load_words_of_4(blocks, low, low + 16, low, low + 16), 4), 0x0F0F0F0F)


panel = panel_by_parts(BLOCK_BYTES, scales_of, in_halves(quants), PLACES, [4 + i for i in PLACES])


@jit
def parts(p: int) -> Any:
    """Return the byte offsets, within a block, of the two 16-byte parts that have quants 64 p to 64 p + 63."""
    low = QUANTS + 32 * p
    return low, low + 16


eight_rows = eight_rows_by_parts(BLOCK_BYTES, put_scales_of_6, parts, NIBBLES_OF_64, BIASED)
