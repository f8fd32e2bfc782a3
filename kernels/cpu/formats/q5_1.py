"""CPU kernels of the format Q5_1: unpack 24-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d, a float16 minimum m, 4 bytes with the fifth bits of 32 quants q, and 16 bytes with the low
4 bits of the quants: quants 0 to 15 in the low four bits of the bytes, quants 16 to 31 in the high four bits. A weight
is `d * q + m`, rounded once.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import fma, load_half_splat
from .fixed_rows import UNSIGNED_BYTES, eight_rows_of_groups
from .format import ONE_PANEL
from .panels import BIASED, load_bits, load_nibbles, panel_of_groups, union
from .quants import load_5_bits
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 24, ONE_PANEL


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    scale, minimum = load_half_splat(blocks, at), load_half_splat(blocks, at + 2)
    quants = load_5_bits(blocks, at + 8, at + 4)
    return fma(scale, quants[0], minimum), fma(scale, quants[1], minimum)


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the 32 quants of the block at byte `at`, as bytes."""
    return union(load_nibbles(blocks, at + 8), load_bits(blocks, at + 4, 16))


scales = scales_of("f16", has_offset=True)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants, BIASED)
eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, quants, UNSIGNED_BYTES, BIASED)
