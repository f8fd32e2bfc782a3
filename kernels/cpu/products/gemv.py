"""Matrix-vector products for decode and small batches (gemv): multiply rows as they are stored.

Memory bandwidth is the limit, so each weight row is read from memory once for all tokens. A core reads several streams
of memory faster than one stream. So the matrix is divided into WAYS ranges of rows (four, or two with a gate). A chunk,
the work of one call of the kernel, has rows from each range, and the kernel multiplies one row of each range at the
same time. With many input vectors, registers suffice for rows of only one or two ranges.

The input vectors (one per token) are packed into panels, (K / 16, vectors, 16): a panel has the first 16 elements of
each of its vectors, then the next 16 elements of each, and so on. While a stretch (STRETCH columns) is multiplied, the
stretch's part of the panel stays in the L1 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import jit, task
from ..build.layout import (
    CHUNK,
    LANES,
    NORM_BIAS,
    NORM_EPS,
    NORM_WEIGHT,
    ROWS,
    STRETCH,
    WEIGHTS,
    WIDTH,
    K,
)
from ..build.memory import floats, number
from ..build.vectors import load, store
from ..formats.format import FORMAT_SCRATCH, TWO_PANELS, four_rows, row_bytes
from ..formats.sums import PANEL_SIZES
from .linear_job import HEIGHT, WAYS, T, X, ceil_div, gates, matrix_of, put_ranges
from .norms import norm


def _first_panel(n_tokens: int) -> int:
    """Return how many vectors the first panel has: all of them, or if two panels are needed, at least half of them."""
    if n_tokens in PANEL_SIZES:
        return n_tokens
    return next(n for n in PANEL_SIZES if 2 * n >= n_tokens and n_tokens - n in PANEL_SIZES)


# `_first_panel` as a table, for compiled code: index n has the result for n vectors.
_FIRST_PANEL = (0, *map(_first_panel, range(1, TWO_PANELS + 1)))
# Prefetch distance in bytes for a single input vector. It is short, because the hardware also prefetches the four rows.
_AHEAD = 1024
# With several vectors, the kernel multiplies one stretch of all rows before the next stretch. So it prefetches the same
# stretch of the row n rows later. n is the smallest number for which n stretches have at least this number of bytes.
_AHEAD_IN_STRETCH = 2048


@jit
def pack_panels(job: Any, x: int, panels: int, normed: int) -> None:
    """Pack the vectors (T, K) at address x into panels at address `panels`; if the job has a norm, apply it first.

    `normed` is the address of scratch memory for the normed vectors (T, K).
    """
    n, n_tokens, source, out = job[K], job[T], floats(x), floats(panels)
    if job[NORM_WEIGHT] != 0:
        source = floats(normed)
        for t in range(n_tokens):
            norm(
                floats(x), t * n, n, job[NORM_WEIGHT], job[NORM_BIAS], np.float32(number(job[NORM_EPS])), source, t * n
            )
    first, at = 0, 0
    while first < n_tokens:
        last = first + _FIRST_PANEL[n_tokens - first]
        for i in range(0, n, LANES):
            for t in range(first, last):
                store(out, at, load(source, t * n + i))
                at += LANES
        first = last


@task
def multiply_stored(job: Any, chunk: int, scratch: int) -> None:
    """Multiply the rows of one chunk with each vector: `y[row] = activation(dot(W[row], x) + bias) + residual`.

    With a gate, `y[row] = activation(dot(gate[row], x)) * dot(up[row], x)`, each product with its bias. The four rows
    that the kernel multiplies at the same time are two rows of the gate matrix and the same two rows of the up matrix.
    """
    m = matrix_of(job, chunk)
    height, apart = ceil_div(job[HEIGHT], job[WAYS]), ceil_div(job[m + ROWS], job[WAYS])
    first = (chunk - job[m + CHUNK]) * height
    n = min(height, apart - first)
    other, after = (m + WIDTH, 0) if gates(job) else (m, 2 * apart)
    n_columns, n_tokens = job[K], job[T]
    # Scratch memory: FORMAT_SCRATCH bytes, then the products (T, 4, size) for the four entries of `rows`. `size` is the
    # number of rows of a range in a chunk (`height`), rounded up to whole SIMD vectors.
    size, place = ceil_div(height, LANES) * LANES, scratch + FORMAT_SCRATCH
    products = floats(place)
    products[: n_tokens * 4 * size] = 0
    # A single vector usually fits into the L1 cache, so each row is read from start to end.
    depth = n_columns if n_tokens == 1 else min(STRETCH, n_columns)
    step = row_bytes(job, m, n_columns)
    ahead = _AHEAD if n_tokens == 1 else ceil_div(_AHEAD_IN_STRETCH, row_bytes(job, m, depth)) * step
    for column in range(0, n_columns, depth):
        columns, from_m = min(depth, n_columns - column), job[m + WEIGHTS] + row_bytes(job, m, column)
        from_other = job[other + WEIGHTS] + row_bytes(job, m, column)
        last_of_m, last_of_other = from_m + (job[m + ROWS] - 1) * step, from_other + (job[other + ROWS] - 1) * step
        rows = (
            from_m + first * step,
            from_m + (first + apart) * step,
            from_other + (first + after) * step,
            from_other + (first + after + apart) * step,
        )
        last = (last_of_m, last_of_m, last_of_other, last_of_other)
        t = 0
        while t < n_tokens:
            n_vectors = _FIRST_PANEL[n_tokens - t]
            four_rows(
                job, m, n_vectors, rows, last, step, n, columns, job[X], t * n_columns + column * n_vectors, place,
                t * 4 * size, size, 4 * size, ahead, scratch,
            )  # fmt: skip
            t += n_vectors
    put_ranges(job, m, first, n, apart, products, size)
