"""Gemm in fixed point (`--activations i16`): the tasks that quantise the input, pack it into panels, and multiply.

`fixed_numpy.py` defines the arithmetic. The inner kernels, called tiles, are in `fixed_tile.py` (SIMD) and
`fixed_amx.py` (AMX, if `TILES` is true). A tile multiplies a panel of weight rows with a panel of at most TOKENS
tokens. So the tokens are divided into groups of at most TOKENS, and each group is packed into one panel. The products
of a token do not depend on the size of its group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit, task
from ..build.layout import CHUNK, NORM_BIAS, NORM_EPS, NORM_WEIGHT, PANEL, PANEL_KIND, ROWS, WEIGHTS, WIDTH, K
from ..build.memory import floats, invoke, number
from ..build.vectors import call_llvm, everywhere
from ..formats.format import FORMAT_SCRATCH, prefetch_weights, row_bytes
from ..formats.panels import DEPTH, HALVES, ROW_WORDS, TILES
from ..formats.panels import ROWS as PANEL_ROWS
from .fixed_amx import configure_tiles, multiply_tiles, release_tiles
from .fixed_numpy import BLOCK, LEAST, LIMIT
from .fixed_tile import TOKEN_WORDS, TOKENS, multiply_panels, pack
from .linear_job import HEIGHT, PIECES, SPAN, T, X, Y, ceil_div, gate_row, gates, matrix_of, put_row
from .norms import norm

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_F32, BLOCK), ir.VectorType(_I32, BLOCK)
_LEAST_BITS, _INFINITE_BITS = int(LEAST.view(np.int32)), 0x7F800000
# Size in bytes of a panel of weight rows with DEPTH columns.
_PANEL_BYTES = 4 * ROW_WORDS * PANEL_ROWS * DEPTH // BLOCK


@intrinsic
def _quantize_block(typing: Any, x: Any, quants: Any, scale: Any) -> Any:
    """Quantise BLOCK floats at address `x` to int16 at address `quants`; write their scale to address `scale`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, quants, scale = (
            builder.inttoptr(a, kind.as_pointer())
            for a, kind in zip(args, (_INTS, ir.VectorType(_I16, BLOCK), _F32), strict=True)
        )
        bits = builder.load(x)
        bits.align = 4
        sizes = builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * BLOCK))
        # The bits are compared as integers: NaN is then larger than infinity, and infinity larger than all numbers.
        top = call_llvm(builder, f"llvm.vector.reduce.umax.v{BLOCK}i32", _I32, [sizes])
        is_finite = builder.icmp_unsigned("<", top, ir.Constant(_I32, _INFINITE_BITS))
        is_usual = builder.and_(is_finite, builder.icmp_unsigned(">=", top, ir.Constant(_I32, _LEAST_BITS)))
        limit, nothing = ir.Constant(_F32, float(LIMIT)), ir.Constant(_F32, 0.0)
        safe = builder.select(is_usual, builder.bitcast(top, _F32), limit)
        kept = builder.select(is_usual, bits, ir.Constant(_INTS, None))
        factor = everywhere(builder, builder.fdiv(limit, safe), BLOCK)
        rounded = call_llvm(
            builder, f"llvm.rint.v{BLOCK}f32", _FLOATS, [builder.fmul(builder.bitcast(kept, _FLOATS), factor)]
        )
        found = builder.trunc(builder.fptosi(rounded, _INTS), quants.type.pointee)
        builder.store(found, quants).align = 2
        unusual = builder.select(is_finite, nothing, ir.Constant(_F32, float("nan")))
        builder.store(builder.select(is_usual, builder.fdiv(safe, limit), unusual), scale).align = 4
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@jit
def quantize(x: int, n: int, quants: int, scales: int) -> None:
    """Quantise a row of n floats at address x to n int16 at address `quants` and n / BLOCK scales at `scales`."""
    for b in range(n // BLOCK):
        _quantize_block(x + 4 * BLOCK * b, quants + 2 * BLOCK * b, scales + 4 * b)


@jit
def first_of(job: Any, group: int) -> Any:
    """Return the first token of a group; the sizes of two groups differ by at most one token."""
    return group * job[T] // ceil_div(job[T], TOKENS)


@jit
def quantize_rows(job: Any, first: int, after: int, scratch: int, quants: int, scales: int) -> None:
    """Norm (if the job has a norm) and quantise rows `first` to `after - 1` of the input X.

    The results are written to addresses `quants` and `scales`. `scratch` is the address of space for one float32 row.
    """
    n, eps = job[K], np.float32(number(job[NORM_EPS]))
    for t in range(first, after):
        row, i = job[X] + 4 * t * n, t - first
        if job[NORM_WEIGHT] != 0:
            norm(floats(row), 0, n, job[NORM_WEIGHT], job[NORM_BIAS], eps, floats(scratch), 0)
            row = scratch
        quantize(row, n, quants + 2 * n * i, scales + 4 * (n // BLOCK) * i)


@task
def prepare_fixed(job: Any, chunk: int, scratch: int) -> None:
    """Norm (if the job has a norm) and quantise the rows of group `chunk` of X, and pack them into a panel in Y."""
    n, first, after = job[K], first_of(job, chunk), first_of(job, chunk + 1)
    n_blocks, quants = n // BLOCK, scratch + 4 * n
    scales = quants + 2 * n * TOKENS
    quantize_rows(job, first, after, scratch, quants, scales)
    pack(quants, scales, after - first, n_blocks, job[Y] + 4 * TOKEN_WORDS * n_blocks * first)


@jit
def _add_panel(
    job: Any, m: int, first: int, end: int, column: int, group: int, end_group: int, scratch: int, y: int
) -> None:
    """Multiply a panel of rows of matrix m with several groups of tokens, over at most DEPTH columns from `column` on.

    The panel has at most PANEL_ROWS rows, from row `first` on; `end` is the end of the chunk's rows. The groups are
    `group` to `end_group - 1`. The products are added to PANEL_ROWS floats per token at address `y`. Scratch memory at
    address `scratch` has FORMAT_SCRATCH bytes for unpacking, then space for the panel of rows.
    """
    n, n_columns, panel, t = min(PANEL_ROWS, end - first), job[K], scratch + FORMAT_SCRATCH, first_of(job, group)
    kind = job[m + PANEL_KIND]
    depth, n_blocks, step = min(DEPTH, n_columns - column), n_columns // BLOCK, row_bytes(job, m, n_columns)
    begin = job[m + WEIGHTS] + first * step + row_bytes(job, m, column)
    invoke(job[m + PANEL], (begin, step, n, depth, panel, scratch))
    # Prefetch the next columns of these rows. If `column` is 0, also prefetch the next panel's first columns.
    for i in range(first, first + n):
        prefetch_weights(job, m, n_columns, i, column + DEPTH, min(DEPTH, n_columns - column - DEPTH))
        if column == 0 and i + PANEL_ROWS < end:
            prefetch_weights(job, m, n_columns, i + PANEL_ROWS, 0, min(DEPTH, n_columns))
    for g in range(group, end_group):
        i, after = first_of(job, g), first_of(job, g + 1)
        tokens = job[X] + 4 * TOKEN_WORDS * (n_blocks * i + column // BLOCK * (after - i))
        to = y + 4 * PANEL_ROWS * (i - t)
        if TILES and kind & HALVES == 0:
            multiply_tiles(after - i, panel, tokens, depth // BLOCK, to, PANEL_ROWS, kind)
        else:
            multiply_panels(after - i, panel, tokens, depth // BLOCK, to, PANEL_ROWS, kind)


@task
def multiply_fixed(job: Any, chunk: int, scratch: int) -> None:
    """Multiply the rows of one chunk with up to SPAN groups of tokens, then apply bias, activation and residual."""
    piece, group = chunk % job[PIECES], chunk // job[PIECES] * job[SPAN]
    end_group = min(group + job[SPAN], ceil_div(job[T], TOKENS))
    m, n_matrices = matrix_of(job, piece), 2 if gates(job) else 1
    begin = (piece - job[m + CHUNK]) * job[HEIGHT]
    end, t = min(begin + job[HEIGHT], job[m + ROWS]), first_of(job, group)
    # Scratch memory: first the memory that `_add_panel` uses, then the sums (panels, n_matrices, n_tokens, PANEL_ROWS).
    n_tokens, place = first_of(job, end_group) - t, scratch + FORMAT_SCRATCH + _PANEL_BYTES
    size, sums = PANEL_ROWS * n_tokens, floats(place)
    sums[: ceil_div(end - begin, PANEL_ROWS) * n_matrices * size] = 0
    if TILES:
        configure_tiles(ceil_div(job[T], ceil_div(job[T], TOKENS)))
    # The outer loop is over columns, so that DEPTH columns of the tokens' panels stay in the L2 cache while all panels
    # of rows are multiplied with them.
    for column in range(0, job[K], DEPTH):
        at = place
        for first in range(begin, end, PANEL_ROWS):
            for i in range(n_matrices):
                _add_panel(job, m + i * WIDTH, first, end, column, group, end_group, scratch, at)
                at += 4 * size
    if TILES:
        release_tiles()
    at = 0
    for first in range(begin, end, PANEL_ROWS):
        n = min(PANEL_ROWS, end - first)
        for i in range(n_tokens):
            if n_matrices == 2:
                gate_row(job, m, first, n, sums, at + PANEL_ROWS * i, size)
            put_row(job, m, t + i, first, n, sums, at + PANEL_ROWS * i)
        at += n_matrices * size
