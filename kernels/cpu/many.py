"""Products with many vectors: rows are expanded and multiplied in registers, for arithmetic is the limit.

They are expanded a piece at a time, so that they fit a core's own cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.activations import activate, gated
from kernels.cpu.formats import ask_for, expand
from kernels.cpu.gemm import multiply_add, pack
from kernels.cpu.jit import jit, task
from kernels.cpu.layout import (
    ACTIVATION,
    BIAS,
    CHUNK,
    COLUMN,
    EPS,
    GAIN,
    KIND,
    LANES,
    MANY_ROWS,
    ROWS,
    SHIFT,
    TABLE,
    WEIGHTS,
    WIDTH,
    K,
    N,
)
from kernels.cpu.linear_job import HEIGHT, PIECES, RESIDUAL, SPAN, T, X, Y, matrix_of
from kernels.cpu.memory import floats, number
from kernels.cpu.norms import norm
from kernels.cpu.vectors import get, load, put, store, store_columns

# Columns that are expanded at a time.
DEPTH = 256


@jit
def _panel_products(
    job: Any, m: int, n_matrices: int, first: int, n_rows: int, t: int, n_panels: int, weights: Any, sums: Any
) -> None:
    """`sums[p]` += products of the panel of tokens t + 16 p with rows of matrix m, then of those that follow it.

    `sums` is (n_panels, n_matrices * n_rows, 16), `weights` has room for as many rows of DEPTH columns.
    """
    n_columns, height = job[K], n_matrices * n_rows
    x = floats(job[X])
    for column in range(0, n_columns, DEPTH):
        depth = min(DEPTH, n_columns - column)
        # What comes next is far apart in memory: the next columns of these rows, or the first ones of the next.
        last = column + depth == n_columns
        next_row, next_column = (first + n_rows, 0) if last else (first, column + depth)
        for i in range(n_matrices):
            kind, address = job[m + i * WIDTH + KIND], job[m + i * WIDTH + WEIGHTS]
            for r in range(n_rows):
                expand(kind, address, n_columns, first + r, column, depth, weights, (i * n_rows + r) * DEPTH)
                ask_for(kind, address, n_columns, next_row + r, next_column, DEPTH)
        for p in range(n_panels):
            panel = ((t // LANES + p) * n_columns + column) * LANES
            multiply_add(weights, 0, DEPTH, 1, height, x, panel, sums, p * height * LANES, depth)


@jit
def _transpose(sums: Any, at: int, n_rows: int, out: Any) -> None:
    """`out[i * MANY_ROWS + r] = sums[at + 16 r + i]` for 16 tokens i; whatever follows the rows fills the last four."""
    for r in range(0, n_rows, 4):
        row = at + LANES * r
        store_columns(
            out, r, MANY_ROWS,
            load(sums, row), load(sums, row + LANES), load(sums, row + 2 * LANES), load(sums, row + 3 * LANES),
        )  # fmt: skip


@task
def multiply_many(job: Any, chunk: int, scratch: int) -> None:
    """What `multiply_few` does, for packed vectors."""
    piece, t = chunk % job[PIECES], chunk // job[PIECES] * job[SPAN]
    m = matrix_of(job, piece)
    first = (piece - job[m + CHUNK]) * job[HEIGHT]
    n_rows, n_tokens = min(job[HEIGHT], job[m + ROWS] - first), min(job[SPAN], job[T] - t)
    n_panels = (n_tokens + LANES - 1) // LANES
    weights, sums = floats(scratch), floats(scratch + 4 * MANY_ROWS * DEPTH)
    sums[: (n_panels * n_rows + 3) * LANES] = 0
    _panel_products(job, m, 1, first, n_rows, t, n_panels, weights, sums)
    y, residual, bias = floats(job[Y]), floats(job[RESIDUAL]), floats(job[m + BIAS])
    for i in range(n_tokens):
        if i % LANES == 0:
            _transpose(sums, i * n_rows, n_rows, weights)
        source, target = i % LANES * MANY_ROWS, (t + i) * job[N] + job[m + COLUMN] + first
        if job[m + BIAS] != 0:
            for r in range(n_rows):
                put(weights, source + r, get(weights, source + r) + get(bias, first + r))
        if job[ACTIVATION] != 0:
            for r in range(0, n_rows, LANES):
                store(weights, source + r, activate(job[ACTIVATION], load(weights, source + r)))
        if job[RESIDUAL] != 0:
            for r in range(n_rows):
                put(y, target + r, get(weights, source + r) + get(residual, target + r))
        else:
            for r in range(n_rows):
                put(y, target + r, get(weights, source + r))


@task
def multiply_many_gated(job: Any, chunk: int, scratch: int) -> None:
    """What `multiply_few_gated` does, for packed vectors: half of the rows are the gate's, half those above it."""
    first, t = chunk % job[PIECES] * job[HEIGHT], chunk // job[PIECES] * job[SPAN]
    n_rows, n_tokens = min(job[HEIGHT], job[TABLE + ROWS] - first), min(job[SPAN], job[T] - t)
    n_panels = (n_tokens + LANES - 1) // LANES
    weights, sums = floats(scratch), floats(scratch + 4 * MANY_ROWS * DEPTH)
    sums[: (n_panels * 2 * n_rows + 3) * LANES] = 0
    _panel_products(job, TABLE, 2, first, n_rows, t, n_panels, weights, sums)
    for p in range(n_panels):
        for r in range(n_rows):
            at = (p * 2 * n_rows + r) * LANES
            store(sums, at, gated(job[ACTIVATION], load(sums, at), load(sums, at + n_rows * LANES)))
    y = floats(job[Y])
    for i in range(n_tokens):
        if i % LANES == 0:
            _transpose(sums, i * 2 * n_rows, n_rows, weights)
        source, target = i % LANES * MANY_ROWS, (t + i) * job[N] + first
        for r in range(n_rows):
            put(y, target + r, get(weights, source + r))


@task
def pack_panels(job: Any, panel: int, scratch: int) -> None:
    """16 of the plain rows at X packed for `multiply_many`, normed first if there is a gain; the panels go to Y."""
    n, t = job[K], panel * LANES
    n_rows = min(LANES, job[T] - t)
    x, out = floats(job[X] + 4 * t * n), floats(job[Y])
    one = np.float32(1)
    if job[GAIN] == 0:
        pack(x, 0, n, n_rows, n, one, out, panel * LANES * n)
        return
    normed, eps = floats(scratch), np.float32(number(job[EPS]))  # (16, n)
    for r in range(n_rows):
        norm(x, r * n, n, job[GAIN], job[SHIFT], eps, normed, r * n)
    pack(normed, 0, n, n_rows, n, one, out, panel * LANES * n)
