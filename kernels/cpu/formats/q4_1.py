"""CPU kernels of the format Q4_1: unpack 20-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d, a float16 minimum m, then 16 bytes with 32 quants q of 4 bits: byte i has the quant of
weight i in its low four bits, and the quant of weight i + 16 in its high four bits. A weight is `d * q + m`, rounded
once.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_half_splat, sub, zeros
from .fixed_rows import NIBBLES, eight_rows_of_groups, load_16
from .format import ONE_PANEL
from .panels import BIASED, load_nibbles, panel_of_groups
from .quants import load_uint8, right, scale_4_bits
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 20, ONE_PANEL


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    scale, quants = load_half_splat(blocks, at), load_uint8(blocks, at + 4)
    minus_m = sub(zeros(), load_half_splat(blocks, at + 2))
    return scale_4_bits(quants, scale, minus_m), scale_4_bits(right(quants, 4), scale, minus_m)


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the 32 quants of the block at byte `at`, as bytes."""
    return load_nibbles(blocks, at + 4)


scales = scales_of("f16", has_offset=True)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants, BIASED)


@jit
def packed(blocks: Any, at: int, p: int) -> Any:
    """Return the 16 bytes with the quants of the block at byte `at`."""
    return load_16(blocks, at + 4)


eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, packed, NIBBLES, BIASED)
