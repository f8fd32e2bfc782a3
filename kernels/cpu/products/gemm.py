"""Matrix products for prefill (gemm): expand weight rows to float32, and multiply them in register tiles.

Weight rows are expanded one stretch of columns at a time. For at most GEMM_NEAR tokens, four weight rows are expanded
at a time, so that they stay in the first-level cache. For more tokens, GEMM_ROWS weight rows are expanded at a time, so
that the activations are read less often.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import jit, task
from ..build.layout import (
    CHUNK,
    GEMM_NEAR,
    GEMM_ROWS,
    LANES,
    NORM_BIAS,
    NORM_EPS,
    NORM_WEIGHT,
    ROWS,
    STRETCH,
    TILE_ROWS,
    WIDTH,
    K,
)
from ..build.memory import floats, number
from ..build.vectors import PART
from ..formats.float32 import copy
from ..formats.format import FORMAT_SCRATCH, expand, prefetch_weights
from .linear_job import HEIGHT, PIECES, SPAN, STRIDE, T, X, Y, ceil_div, gate_row, gates, matrix_of, put_row
from .norms import norm
from .tile import add_dots, tile_vectors

# Input rows that one chunk of `prepare_rows` prepares.
PREPARED = 16


@jit
def _rows_expanded(n_tokens: int) -> int:
    """Return the number of rows of a matrix to expand before multiplying them."""
    return TILE_ROWS if n_tokens <= GEMM_NEAR else GEMM_ROWS


@jit
def _add_products(
    job: Any, m: int, first: int, n_rows: int, t: int, n_tokens: int, scratch: int, sums: Any, at: int, row: int
) -> None:
    """Compute `sums[at + i*row + r] += dot(W[first + r], x[t + i])` for `n_rows` rows r and `n_tokens` tokens i.

    W is matrix m; `row` is the distance between the sums of two tokens. Sums are written for four rows at a time.

    Scratch memory holds FORMAT_SCRATCH bytes, then one stretch of the rows that are expanded together.
    """
    expanded = scratch + FORMAT_SCRATCH
    weights, n_columns, x = floats(expanded), job[K], floats(job[X])
    groups, together = ceil_div(n_tokens, tile_vectors()), _rows_expanded(n_tokens)
    for r in range(0, n_rows, together):
        n = min(together, n_rows - r)
        for column in range(0, n_columns, STRETCH):
            depth = min(STRETCH, n_columns - column)
            whole = ceil_div(depth, LANES) * LANES
            part = whole // LANES * PART
            for i in range(n):
                to = i * STRETCH
                expand(job, m, n_columns, first + r + i, column, depth, expanded, to, PART, part, scratch)
                if column + STRETCH < n_columns:
                    prefetch_weights(job, m, n_columns, first + r + i, column + STRETCH, STRETCH)
                else:
                    prefetch_weights(job, m, n_columns, first + r + i + together, 0, min(n_columns, STRETCH))
            for g in range(groups):
                # Group sizes differ by one token at most.
                i, after = g * n_tokens // groups, (g + 1) * n_tokens // groups
                for tile in range(0, n, TILE_ROWS):
                    add_dots(
                        weights, tile * STRETCH, STRETCH, x, (t + i) * job[STRIDE] + column, job[STRIDE], after - i,
                        whole, sums, at + i * row + r + tile, row,
                    )  # fmt: skip


@task
def multiply_rows(job: Any, chunk: int, scratch: int) -> None:
    """Multiply the rows of one chunk with a span of tokens, then apply bias, activation and residual."""
    piece, t = chunk % job[PIECES], chunk // job[PIECES] * job[SPAN]
    m, n_matrices = matrix_of(job, piece), 2 if gates(job) else 1
    first = (piece - job[m + CHUNK]) * job[HEIGHT]
    n_rows, n_tokens = min(job[HEIGHT], job[m + ROWS] - first), min(job[SPAN], job[T] - t)
    # Scratch memory: first the memory that `_add_products` uses, then the sums (n_tokens, n_matrices, size).
    size = ceil_div(n_rows, LANES) * LANES
    row, sums = n_matrices * size, floats(scratch + FORMAT_SCRATCH + 4 * GEMM_ROWS * STRETCH)
    sums[: n_tokens * row] = 0
    for i in range(n_matrices):
        _add_products(job, m + i * WIDTH, first, n_rows, t, n_tokens, scratch, sums, i * size, row)
    for i in range(n_tokens):
        if n_matrices == 2:
            gate_row(job, m, first, n_rows, sums, i * row, size)
        put_row(job, m, t + i, first, n_rows, sums, i * row)


@task
def prepare_rows(job: Any, chunk: int, scratch: int) -> None:
    """Copy the rows at X to Y, normed if there is a norm. Rows of Y are padded with zeros to STRIDE elements."""
    n, stride = job[K], job[STRIDE]
    x, out, eps = floats(job[X]), floats(job[Y]), np.float32(number(job[NORM_EPS]))
    for t in range(chunk * PREPARED, min((chunk + 1) * PREPARED, job[T])):
        if job[NORM_WEIGHT] == 0:
            copy(x, t * n, n, out, t * stride, LANES, PART)
        else:
            norm(x, t * n, n, job[NORM_WEIGHT], job[NORM_BIAS], eps, out, t * stride)
            for i in range(n, stride):
                out[t * stride + i] = 0
