"""CPU kernels of the format MXFP4: unpack 17-byte blocks of a GGUF file to float32 weights.

A block is a byte e, then 16 bytes with 32 quants of 4 bits: byte i has the quant of weight i in its low four bits, and
the quant of weight i + 16 in its high four bits. A quant is a float of the format E2M1, and a weight is 2 ** (e - 127)
times the quant. The kernels compute `scale * level`: the level is twice the quant, an integer, and the scale is
2 ** (e - 128). Weights of a magnitude below 2 ** 128 are exact in float32. Weights of at least this magnitude, which
occur only if e >= 253, become infinite.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from .fixed_rows import eight_rows_of_groups
from .format import ONE_PANEL
from .panels import levels_of, load_nibbles, panel_of_groups
from .quants import load_half_power, load_levels
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_one_by_one

BLOCK, BLOCK_BYTES, MOST = 32, 17, ONE_PANEL
LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

load = load_levels(LEVELS)
levels = levels_of(LEVELS)


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    return load(blocks, at + 1, load_half_power(blocks, at))


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the levels of the 32 weights of the block at byte `at`, as signed bytes."""
    return levels(load_nibbles(blocks, at + 1))


scales = scales_one_by_one(load_half_power)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
