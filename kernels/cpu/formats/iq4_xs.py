"""CPU kernels of the format IQ4_XS: unpack 136-byte blocks of a GGUF file to float32 weights.

A block is a float16 factor d; 8 scales of 6 bits (a uint16 has their high 2 bits, a uint32 their low 4 bits); and 256
quants of 4 bits. A group of 32 weights has one scale, and 16 bytes of quants: the low four bits of the bytes have the
first 16 quants, the high four bits the last 16. A quant is an index into the 16 levels of IQ4_NL. A weight is
`(d * (scale - 32)) * level`, exact in float32.
"""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.vectors import load_half_splat, load_splat, mul
from .fixed_rows import eight_rows_by_parts, scales_of_rows
from .format import ONE_PANEL
from .iq4_nl import levels, load
from .panels import load_nibbles, panel_by_parts
from .quants import Field, load_fields
from .rows import dequantize_by_parts, four_rows_by_parts
from .sums import WIDE

BLOCK, BLOCK_BYTES, MOST = 256, 136, ONE_PANEL if WIDE else 4
# Byte offsets in a block: scales (high bits, then low bits) and quants.
SCALES, QUANTS = 2, 8

_GROUPS = [i % 8 for i in range(16)]
_load_scales = load_fields(
    6,
    -32,
    Field([2 + i // 2 for i in _GROUPS], [4 * (i % 2) for i in _GROUPS], 15),
    Field([i // 4 for i in _GROUPS], [2 * (i % 4) for i in _GROUPS], 3, 4),
)


@jit
def scales_of(blocks: Any, at: int) -> Any:
    """Return the 8 products `d * (scale - 32)` of the block at byte `at`: in lanes 0 to 7, and again in 8 to 15."""
    return mul(_load_scales(blocks, at + SCALES), load_half_splat(blocks, at))


@jit
def part(blocks: Any, at: int, p: int, scales: Any, i: int) -> Any:
    """Return weights 64 p to 64 p + 63 of the block at byte `at` in four vectors.

    The block's 8 products `d * (scale - 32)` begin at `scales[i]`.
    """
    start = at + QUANTS + 32 * p
    first = load(blocks, start, load_splat(scales, i + 2 * p))
    second = load(blocks, start + 16, load_splat(scales, i + 2 * p + 1))
    return first[0], first[1], second[0], second[1]


four_rows = four_rows_by_parts(BLOCK_BYTES, scales_of, part)
dequantize = dequantize_by_parts(BLOCK_BYTES, scales_of, part)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the levels of weights 64 p to 64 p + 63 of the block at byte `at`: bytes, in two vectors of 32."""
    start = at + QUANTS + 32 * p
    return levels(load_nibbles(blocks, start)), levels(load_nibbles(blocks, start + 16))


panel = panel_by_parts(BLOCK_BYTES, scales_of, quants, range(8))
eight_rows = eight_rows_by_parts(BLOCK_BYTES, scales_of_rows(scales_of), quants)
