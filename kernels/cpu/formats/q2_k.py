"""CPU kernels of the format Q2_K: unpack 84-byte blocks of a GGUF file to float32 weights.

A block has 16 groups of 16 weights. Its first 16 bytes have the groups' scales in the low four bits, and the groups'
minima in the high four bits. Then follow 64 bytes of quants, 32 bytes for each 128 weights: bits 2 j and 2 j + 1 of
byte i are the quant of weight 32 j + i of the 128. Two float16 factors, d and dmin, are last. A weight is
`(d * scale) * q - dmin * minimum`; the products are exact, so the difference is rounded once.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import fms, load_half_splat, load_splat, mul
from .fixed_rows import eight_rows_by_parts, scales_of_rows
from .format import ONE_PANEL
from .panels import BIASED, HALVES, in_halves, panel_by_parts
from .quants import Field, both, floats_of_bytes, load_fields, load_words_of_4, right, second_right
from .rows import dequantize_by_parts, four_rows_by_parts
from .sums import WIDE

BLOCK, BLOCK_BYTES, MOST = 256, 84, ONE_PANEL if WIDE else 4
# Byte offsets of the quants, of d (the factor of scales) and of dmin (the factor of minima) in a block.
QUANTS, FACTOR, FACTOR_OF_MINIMA = 16, 80, 82

_load_scales = load_fields(16, 0, Field(range(16), [0] * 16, 15))
_load_minima = load_fields(16, 0, Field(range(16), [4] * 16, 15))


@jit
def scales_of(blocks: Any, at: int) -> Any:
    """Return the 16 products `d * scale` and the 16 products `dmin * minimum` of the block at byte `at`."""
    scales = mul(_load_scales(blocks, at), load_half_splat(blocks, at + FACTOR))
    return scales, mul(_load_minima(blocks, at), load_half_splat(blocks, at + FACTOR_OF_MINIMA))


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return quants 64 p to 64 p + 63 of the block at byte `at`: 64 bytes, in a vector of 16 words."""
    bits = at + QUANTS + 32 * (p // 2)
    quants = second_right(load_words_of_4(blocks, bits, bits + 16, bits, bits + 16), 2)
    return both(right(quants, 4 * (p % 2)), 0x03030303)


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at` in four vectors.

    The block's products `d * scale` begin at `scales[i]`, its products `dmin * minimum` at `scales[i + 16]`.
    """
    q = quants(blocks, at, p)
    i += 4 * p
    return (
        fms(load_splat(scales, i), floats_of_bytes(q, 0), load_splat(scales, i + 16)),
        fms(load_splat(scales, i + 1), floats_of_bytes(q, 1), load_splat(scales, i + 17)),
        fms(load_splat(scales, i + 2), floats_of_bytes(q, 2), load_splat(scales, i + 18)),
        fms(load_splat(scales, i + 3), floats_of_bytes(q, 3), load_splat(scales, i + 19)),
    )


four_rows = four_rows_by_parts(BLOCK_BYTES, scales_of, part, 2)
dequantize = dequantize_by_parts(BLOCK_BYTES, scales_of, part, 2)

panel = panel_by_parts(BLOCK_BYTES, scales_of, in_halves(quants), range(16), range(16, 32), HALVES)
eight_rows = eight_rows_by_parts(BLOCK_BYTES, scales_of_rows(scales_of, 2), in_halves(quants), kind=HALVES | BIASED)
