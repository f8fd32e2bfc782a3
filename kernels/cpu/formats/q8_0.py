"""CPU kernels of the format Q8_0: unpack 34-byte blocks of a GGUF file to float32 weights.

A block is a float16 scale d and 32 signed bytes q. A weight is `d * q`, exact in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import jit
from ..build.vectors import load_half_bits, load_half_splat, load_int8, load_splat, mul, register_lanes
from .fixed_rows import eight_rows_of_groups
from .format import ONE_PANEL
from .panels import load_32, panel_of_groups
from .rows import dequantize_32
from .rows import four_rows as make_four_rows
from .scales import scales_of

BLOCK, BLOCK_BYTES, MOST = 32, 34, ONE_PANEL
# Maps the bits of every float16 to its value in float32; used on x86-64. Converting a scale takes two or three
# instructions of the vector units, which also multiply; loading it from this table takes none. With conversions,
# products with 1 to 4 vectors took 5 to 12 % longer (Xeon, code for AVX2 and for AVX-512).
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_HAS_TABLE = register_lanes() > 4


@jit
def weights(blocks: Any, at: int) -> Any:
    """Return the 32 weights of the block at byte `at`, in two vectors."""
    scale = load_splat(_HALVES, load_half_bits(blocks, at)) if _HAS_TABLE else load_half_splat(blocks, at)
    return mul(scale, load_int8(blocks, at + 2)), mul(scale, load_int8(blocks, at + 18))


four_rows = make_four_rows(BLOCK, BLOCK_BYTES, weights)
dequantize = dequantize_32(BLOCK_BYTES, weights)


@jit
def quants(blocks: Any, at: int, p: int) -> Any:
    """Return the 32 quants of the block at byte `at`, as signed bytes."""
    return load_32(blocks, at + 2)


scales = scales_of("f16", has_offset=False)
panel = panel_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
eight_rows = eight_rows_of_groups(BLOCK, BLOCK_BYTES, scales, quants)
