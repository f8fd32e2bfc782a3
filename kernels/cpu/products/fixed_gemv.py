"""Gemv in fixed point (`--activations i16`): the tasks that multiply a few tokens with rows as they are stored.

`fixed_numpy.py` defines the arithmetic. `formats/fixed_rows.py` has the kernels, and defines a token's records: a
record has the token's quants, scale and totals for 32 columns. A kernel multiplies two adjacent rows of each of four
ranges of rows at the same time (`gemv.py` gives the reason).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit, task
from ..build.layout import (
    CHUNK,
    EIGHT_ROWS,
    LANES,
    ROWS,
    WEIGHTS,
    WIDTH,
    K,
)
from ..build.memory import floats, ints, invoke, shorts
from ..build.vectors import get, lanes, put
from ..formats.fixed_rows import (
    DIGITS,
    HALF_TOTALS,
    INT_HALF_TOTALS,
    INT_TOTAL,
    PAIR,
    RECORD_BYTES,
    SCALE,
    TIMES_OF_HALVES,
    TIMES_OF_WHOLE,
    TOTAL,
)
from ..formats.format import FORMAT_SCRATCH, row_bytes
from .fixed import quantize_rows
from .fixed_numpy import BLOCK
from .linear_job import HEIGHT, WAYS, T, X, Y, ceil_div, gates, matrix_of, put_ranges

_I8, _I16 = ir.IntType(8), ir.IntType(16)
# Prefetch distance in bytes.
_AHEAD = 1536


@intrinsic
def _pack_block(typing: Any, quants: Any, to: Any) -> Any:
    """Write 32 int16 from address `quants` to the record at address `to`, as `formats/fixed_rows.py` describes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_I16, 32)
        found = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
        found.align = 2
        if DIGITS:
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
    """Write the records of n tokens to address `to`, from int16 quants (n, 32 * n_blocks) and scales (n, n_blocks)."""
    values, factors = shorts(quants), floats(scales)
    for t in range(n):
        for b in range(n_blocks):
            # The records of each pair of tokens are interleaved block by block. If n is odd, the last token is alone.
            pair, together = t // PAIR * PAIR, min(PAIR, n - t // PAIR * PAIR)
            place = to + RECORD_BYTES * (pair * n_blocks + b * together + t - pair)
            at = 32 * (t * n_blocks + b)
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
            whole[INT_TOTAL // 4] = TIMES_OF_WHOLE * (low + high)
            whole[INT_HALF_TOTALS // 4] = TIMES_OF_HALVES * low
            whole[INT_HALF_TOTALS // 4 + 1] = TIMES_OF_HALVES * high


@task
def prepare_records(job: Any, chunk: int, scratch: int) -> None:
    """Write the records of the rows of X to Y. If the job has a norm, it is applied before the rows are quantised."""
    n, n_tokens = job[K], job[T]
    quants = scratch + 4 * n
    scales = quants + 2 * n * n_tokens
    quantize_rows(job, 0, n_tokens, scratch, quants, scales)
    pack_records(quants, scales, n_tokens, n // BLOCK, job[Y])


@task
def multiply_fixed_stored(job: Any, chunk: int, scratch: int) -> None:
    """Do in fixed point what `gemv.multiply_stored` does: multiply the weight rows of one chunk with all tokens."""
    m = matrix_of(job, chunk)
    height, apart = ceil_div(job[HEIGHT], job[WAYS]), ceil_div(job[m + ROWS], job[WAYS])
    first = (chunk - job[m + CHUNK]) * height
    n, n_tokens = min(height, apart - first), job[T]
    other, after = (m + WIDTH, 0) if gates(job) else (m, 2 * apart)
    # Scratch memory: FORMAT_SCRATCH bytes, then the products (T, 4, size) of the four ranges. `size` is `height`,
    # rounded up to whole SIMD vectors.
    size, place = ceil_div(height, LANES) * LANES, scratch + FORMAT_SCRATCH
    products, step = floats(place), row_bytes(job, m, job[K])
    from_m, from_other = job[m + WEIGHTS], job[other + WEIGHTS]
    last_of_m, last_of_other = from_m + (job[m + ROWS] - 1) * step, from_other + (job[other + ROWS] - 1) * step
    invoke(
        job[m + EIGHT_ROWS],
        (
            n_tokens, from_m + first * step, from_m + (first + apart) * step, from_other + (first + after) * step,
            from_other + (first + after + apart) * step, last_of_m, last_of_m, last_of_other, last_of_other, step, n,
            job[K], job[X], place, size, 4 * size, _AHEAD, scratch,
        ),
    )  # fmt: skip
    put_ranges(job, m, first, n, apart, products, size)
