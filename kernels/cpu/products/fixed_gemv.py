"""Records of one or two tokens in fixed point, for products with rows as they are stored (`formats/fixed_rows.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.memory import floats, ints, shorts
from ..build.vectors import get, lanes, put
from ..formats.fixed_rows import HALF_TOTALS, RECORD_BYTES, SCALE, TOTAL, WHOLE_TOTAL
from ..formats.panels import QUADS

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)


@intrinsic
def _pack_block(typing: Any, quants: Any, to: Any) -> Any:
    """Write 32 int16 at address `quants` to a record at `to`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_I16, 32)
        found = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
        found.align = 2
        if QUADS:
            rounded = builder.add(found, ir.Constant(kind, [128] * 32))
            high = builder.trunc(builder.ashr(rounded, ir.Constant(kind, [8] * 32)), ir.VectorType(_I8, 32))
            low = builder.trunc(found, high.type)
            packed = lanes(
                builder, high, low, [side + half + i for half in (0, 16) for side in (0, 32) for i in range(16)]
            )
        else:
            places = [half + 2 * i + odd for half in (0, 16) for odd in (0, 1) for i in range(8)]
            packed = lanes(builder, found, found, places)
        builder.store(packed, builder.inttoptr(args[1], packed.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@jit
def pack_records(quants: int, scales: int, n: int, n_blocks: int, to: int) -> None:
    """Write the records of n tokens, (n, 32 n_blocks) int16 and (n, n_blocks) scales at these addresses, to `to`."""
    values, factors = shorts(quants), floats(scales)
    for t in range(n):
        for b in range(n_blocks):
            place, at = to + RECORD_BYTES * (b * n + t), 32 * (t * n_blocks + b)
            words, whole, scale = floats(place), ints(place), get(factors, t * n_blocks + b)
            _pack_block(quants + 2 * at, place)
            low, high = np.int32(0), np.int32(0)
            for i in range(at, at + 16):
                low += values[i]
                high += values[i + 16]
            put(words, SCALE // 4, scale)
            put(words, TOTAL // 4, np.float32(low + high) * scale)
            put(words, HALF_TOTALS // 4, np.float32(low) * scale)
            put(words, HALF_TOTALS // 4 + 1, np.float32(high) * scale)
            whole[WHOLE_TOTAL // 4] = low + high
