"""CPU kernels of the format IQ4_NL: unpack 18-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d, then 16 bytes with 32 quants of 4 bits: byte i has the quant of weight i in its low four
bits, and the quant of weight i + 16 in its high four bits. A quant is an index into LEVELS. A weight is `d * level`,
exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_half_splat
from .fixed_rows import eight_rows_of_groups
from .format import ONE_PANEL
from .panels import levels_of, load_nibbles, panel_of_groups
from .quants import load_levels
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 18, ONE_PANEL
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

load = load_levels(LEVELS)
levels = levels_of(LEVELS)


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    return load(blocks, at + 2, load_half_splat(blocks, at))


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the levels of the 32 weights of the block at byte `at`, as signed bytes."""
    return levels(load_nibbles(blocks, at + 2))


scales = scales_of("f16", has_offset=False)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
