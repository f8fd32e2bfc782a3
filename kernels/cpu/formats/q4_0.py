"""CPU kernels of the format Q4_0: unpack 18-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d, then 16 bytes with 32 quants q of 4 bits: byte i has the quant of weight i in its low four
bits, and the quant of weight i + 16 in its high four bits. A weight is `d * (q - 8)`, exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_half_splat, mul, splat
from .fixed_rows import NIBBLES, eight_rows_of_groups, load_16
from .format import ONE_PANEL
from .panels import load_nibbles, panel_of_groups, plus
from .quants import load_uint8, right, scale_4_bits
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 18, ONE_PANEL


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    scale, quants = load_half_splat(blocks, at), load_uint8(blocks, at + 2)
    offset = mul(scale, splat(8.0))
    return scale_4_bits(quants, scale, offset), scale_4_bits(right(quants, 4), scale, offset)


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return `q - 8` of the 32 weights of the block at byte `at`, as signed bytes."""
    return plus(load_nibbles(blocks, at + 2), -8)


scales = scales_of("f16", has_offset=False)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants)


@jit
def packed(blocks: Any, at: int, p: int) -> Any:
    """Return the 16 bytes with the quants of the block at byte `at`."""
    return load_16(blocks, at + 2)


eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, packed, NIBBLES, minus=8)
