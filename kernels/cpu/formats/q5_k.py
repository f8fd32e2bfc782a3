"""CPU kernels of the format Q5_K: unpack 176-byte blocks of a GGUF file to float32 weights.

A block has 256 quants q. It begins with two float16 factors, d and dmin, and 8 scales and 8 minima, stored as in Q4_K.
Then come 32 bytes with the fifth bits of the quants (bit g of byte i belongs to quant 32 g + i), and 128 bytes with the
low 4 bits, stored as in Q4_K. A weight is `(d * scale) * q - dmin * minimum`, rounded once.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import fms, load_splat
from .fixed_rows import UNSIGNED_BYTES, eight_rows_by_parts, put_scales_of_6
from .format import ONE_PANEL
from .panels import BIASED, in_halves, panel_by_parts
from .q4_k import PLACES, scales_of
from .quants import both, either, floats_of_bytes, left, load_words_of_4, right, second_right
from .rows import dequantize_by_parts, four_rows_by_parts
from .sums import WIDE

BLOCK, BLOCK_BYTES, MOST = 256, 176, ONE_PANEL if WIDE else 4
# Byte offsets in a block: fifth bits, and the low bits of quants.
HIGH, LOW = 16, 48


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return quants 64 p to 64 p + 63 of the block at byte `at`: 64 bytes, in a vector of 16 words."""
    bits, low = at + HIGH, at + LOW + 32 * p
    # Bit 2 p of each of the 32 bytes belongs to one of the first 32 of these 64 quants, bit 2 p + 1 to one of the last
    # 32.
    fifth = second_right(load_words_of_4(blocks, bits, bits + 16, bits, bits + 16), 1)
    fifth = left(both(right(fifth, 2 * p), 0x01010101), 4)
    quants = both(second_right(load_words_of_4(blocks, low, low + 16, low, low + 16), 4), 0x0F0F0F0F)
    return either(quants, fifth)


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at` in four vectors.

    The result of `scales_of` for this block begins at `scales[i]`.
    """
    q = quants(blocks, at, p)
    i += 8 * (p // 2) + 2 * (p % 2)
    scale, minimum = load_splat(scales, i), load_splat(scales, i + 4)
    next_scale, next_minimum = load_splat(scales, i + 1), load_splat(scales, i + 5)
    return (
        fms(scale, floats_of_bytes(q, 0), minimum),
        fms(scale, floats_of_bytes(q, 1), minimum),
        fms(next_scale, floats_of_bytes(q, 2), next_minimum),
        fms(next_scale, floats_of_bytes(q, 3), next_minimum),
    )


four_rows = four_rows_by_parts(BLOCK_BYTES, scales_of, part)
dequantize = dequantize_by_parts(BLOCK_BYTES, scales_of, part)

panel = panel_by_parts(BLOCK_BYTES, scales_of, in_halves(quants), PLACES, [4 + i for i in PLACES])
eight_rows = eight_rows_by_parts(BLOCK_BYTES, put_scales_of_6, in_halves(quants), UNSIGNED_BYTES, BIASED)
