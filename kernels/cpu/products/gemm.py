"""Matrix products for prefill (gemm): expand weight rows to float32, and multiply them in register tiles.

Weight rows are expanded one stretch (STRETCH columns) at a time. For at most GEMM_NEAR tokens, four weight rows are
expanded at a time, so that they stay in the L1 cache. For more tokens, GEMM_ROWS weight rows are expanded at a time, so
that the activations are read less often. While a tile multiplies, it prefetches the rows that are expanded next, one
cache line per 16 columns. This takes 10 to 16 % less time than bursts of prefetches, which delay reads of activations
from the L2 cache (12 to 32 tokens, Xeon, AVX-512).

With AVX2, a tile makes two sweeps (`tile.py`): the first one reads the first 8 of each 16 columns, the second one the
last 8. So expanded rows and activations are stored in two *parts*: the first 8 of each 16 columns of all rows, then the
last 8. The tokens of two tiles are multiplied with the first parts of all weight rows, then with the last parts. One
part of four weight rows and of these tokens fits into an L1 cache of 32 KB, so weight rows are read from the L2 cache
once for two tiles. According to a simulation, this reads 13 bytes from the L2 cache per cycle of multiply-adds. One
tile at a time would read 22 bytes, nearly the L2 bandwidth of a Zen 3 core.
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
    WEIGHTS,
    WIDTH,
    K,
)
from ..build.memory import floats, number
from ..build.vectors import PART
from ..formats.float32 import copy
from ..formats.format import FORMAT_SCRATCH, expand, row_bytes
from .linear_job import HEIGHT, PIECES, SPAN, STRIDE, T, X, Y, ceil_div, gate_row, gates, matrix_of, put_row
from .norms import norm
from .tile import KEPT, add_dots, keep_dots, tile_vectors

# Number of input rows that one chunk of `prepare_rows` prepares.
PREPARED = 16
# Number of parts in which expanded rows and activations are stored, and also the number of tiles of tokens that are
# multiplied with the same rows.
PARTS = LANES // PART
# Number of sums (floats) that are kept in memory between the two sweeps.
_ALL_KEPT = GEMM_ROWS // TILE_ROWS * PARTS * KEPT if PARTS > 1 else 0
# Floats from a part of an expanded row to the same part of the next row. With one part, the distance would be 4,096
# bytes, at which all rows use the same sets of the L1 cache, so LANES floats are added. With AVX2 the distance is 2,048
# bytes, and adjacent rows use different sets without added floats.
_PART_ROW = STRETCH // PARTS + (LANES if PARTS == 1 else 0)
# Bytes of memory for one stretch of GEMM_ROWS expanded rows.
_EXPANDED = 4 * GEMM_ROWS * PARTS * _PART_ROW


@jit
def _rows_expanded(n_tokens: int) -> int:
    """Return how many weight rows are expanded before they are multiplied."""
    return TILE_ROWS if n_tokens <= GEMM_NEAR else GEMM_ROWS


@jit
def _add_products(
    job: Any, m: int, first: int, n_rows: int, t: int, n_tokens: int, scratch: int, sums: Any, at: int, row: int
) -> None:
    """Compute `sums[at + i * row + r] += dot(W[first + r], x[t + i])` for `n_rows` rows r and `n_tokens` tokens i.

    W is matrix m of the job. Sums are written for four rows at a time, so up to three sums after the last row are
    written, too. Scratch memory is FORMAT_SCRATCH bytes, then one stretch of GEMM_ROWS expanded rows, then the sums
    that are kept between two sweeps.
    """
    expanded = scratch + FORMAT_SCRATCH
    n_columns, together = job[K], _rows_expanded(n_tokens)
    stored = row_bytes(job, m, n_columns)
    # Bytes from one prefetched cache line to the next. A tile prefetches one line per 16 columns, so this distance lets
    # all tiles of four rows together prefetch the bytes of four stored rows.
    step = ceil_div(stored * TILE_ROWS * LANES, n_columns * ceil_div(n_tokens, tile_vectors()))
    for r in range(0, n_rows, together):
        n, ahead = min(together, n_rows - r), job[m + WEIGHTS] + (first + r + together) * stored
        for column in range(0, n_columns, STRETCH):
            depth = min(STRETCH, n_columns - column)
            for i in range(n):
                to = i * _PART_ROW
                expand(
                    job, m, n_columns, first + r + i, column, depth, expanded, to, PART, together * _PART_ROW, scratch
                )
            ahead = _add_stretch(job, expanded, together, n, column, t, n_tokens, sums, at + r, row, ahead, step)


@jit
def _add_stretch(
    job: Any, expanded: int, together: int, n: int, column: int, t: int, n_tokens: int, sums: Any, at: int, row: int,
    ahead: int, step: int,
) -> int:  # fmt: skip
    """Add to `sums` the products of n expanded rows and a span of tokens, over the stretch that begins at `column`.

    For each 16 columns of a tile, prefetch the cache line at address `ahead`, and advance `ahead` by `step` bytes.
    Return the new `ahead`.
    """
    whole = ceil_div(min(STRETCH, job[K] - column), LANES) * LANES
    weights, kept, x = floats(expanded), floats(expanded + _EXPANDED), floats(job[X])
    x_row, x_at = job[STRIDE], column
    if PARTS > 1:
        x_row, x_at = whole // PARTS, column * job[T]
    tiles = ceil_div(n_tokens, tile_vectors())
    for g in range(0, tiles, PARTS):
        # Sizes of tiles differ by at most one token. The bounds of tiles are computed outside of the loop over rows,
        # because inside it, the divisions would take 2 % of the time.
        begin, middle = g * n_tokens // tiles, (g + 1) * n_tokens // tiles
        end = min(g + PARTS, tiles) * n_tokens // tiles
        for part in range(PARTS):
            w_part, x_part = part * together * _PART_ROW, x_at + part * job[T] * x_row
            for r in range(0, n, TILE_ROWS):
                i, after, keep = begin, middle, r // TILE_ROWS * PARTS * KEPT
                while i < end:
                    at_w, at_x, n_vectors = w_part + r * _PART_ROW, x_part + (t + i) * x_row, after - i
                    if part < PARTS - 1:
                        keep_dots(weights, at_w, _PART_ROW, x, at_x, x_row, n_vectors, whole, kept, keep)
                    else:
                        add_dots(
                            weights, at_w, _PART_ROW, x, at_x, x_row, n_vectors, whole, kept, keep, sums,
                            at + i * row + r, row, ahead, step,
                        )  # fmt: skip
                        ahead += whole // LANES * step
                    i, after, keep = after, end, keep + KEPT
    return ahead


@task
def multiply_rows(job: Any, chunk: int, scratch: int) -> None:
    """Multiply the rows of one chunk with a span of tokens, then apply bias, activation and residual."""
    piece, t = chunk % job[PIECES], chunk // job[PIECES] * job[SPAN]
    m, n_matrices = matrix_of(job, piece), 2 if gates(job) else 1
    first = (piece - job[m + CHUNK]) * job[HEIGHT]
    n_rows, n_tokens = min(job[HEIGHT], job[m + ROWS] - first), min(job[SPAN], job[T] - t)
    # Scratch memory: the memory that `_add_products` uses, then the sums (n_tokens, n_matrices, size).
    size = ceil_div(n_rows, LANES) * LANES
    row, sums = n_matrices * size, floats(scratch + FORMAT_SCRATCH + _EXPANDED + 4 * _ALL_KEPT)
    sums[: n_tokens * row] = 0
    for i in range(n_matrices):
        _add_products(job, m + i * WIDTH, first, n_rows, t, n_tokens, scratch, sums, i * size, row)
    for i in range(n_tokens):
        if n_matrices == 2:
            gate_row(job, m, first, n_rows, sums, i * row, size)
        put_row(job, m, t + i, first, n_rows, sums, i * row)


@task
def prepare_rows(job: Any, chunk: int, scratch: int) -> None:
    """Write PREPARED rows of X, one chunk, to Y, padded with zeros. If the job has a norm, apply it first.

    Without AVX2, Y is (T, STRIDE). With AVX2, Y is a sequence of stretches, each stored as (2 parts, T, columns / 2).
    """
    n, stride = job[K], job[STRIDE]
    x, out, eps = floats(job[X]), floats(job[Y]), np.float32(number(job[NORM_EPS]))
    depth = STRETCH if PARTS > 1 else n
    for t in range(chunk * PREPARED, min((chunk + 1) * PREPARED, job[T])):
        source, at = x, t * n
        if job[NORM_WEIGHT] != 0:
            source, at = floats(scratch), 0
            norm(x, t * n, n, job[NORM_WEIGHT], job[NORM_BIAS], eps, source, 0)
        for column in range(0, n, depth):
            size = min(depth, n - column)
            part, to = ceil_div(size, LANES) * PART, t * stride
            if PARTS > 1:
                to = column * job[T] + t * part
            copy(source, at + column, size, out, to, PART, job[T] * part)
