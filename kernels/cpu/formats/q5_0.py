"""CPU kernels of the format Q5_0: unpack 22-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d, 4 bytes with the fifth bits of 32 quants q, and 16 bytes with the low 4 bits of the
quants: quants 0 to 15 in the low four bits of the bytes, quants 16 to 31 in the high four bits. A weight is
`d * (q - 16)`, exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import fms, load_half_splat, mul, splat
from .fixed_rows import eight_rows_of_groups
from .format import ONE_PANEL
from .panels import load_bits, load_nibbles, panel_of_groups, plus, union
from .quants import load_5_bits
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 22, ONE_PANEL


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    scale, quants = load_half_splat(blocks, at), load_5_bits(blocks, at + 6, at + 2)
    offset = mul(scale, splat(16.0))
    return fms(scale, quants[0], offset), fms(scale, quants[1], offset)


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return `q - 16` for the 32 quants q of the block at byte `at`, as signed bytes."""
    return plus(union(load_nibbles(blocks, at + 6), load_bits(blocks, at + 2, 16)), -16)


scales = scales_of("f16", has_offset=False)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
