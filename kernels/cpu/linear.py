"""Linear layers: several matrices with the same input in one job, and what is done with their products.

For few vectors every row is multiplied as it is stored: memory is the limit. For many, rows are expanded a piece at a
time, while they fit a core's own cache, and multiplied in registers: arithmetic is the limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu import pool
from kernels.cpu.activations import gated
from kernels.cpu.formats import F32, ask_for, expand, matvecs
from kernels.cpu.gemm import multiply_add, pack
from kernels.cpu.jit import jit, task
from kernels.cpu.memory import floats, keep_alive, number, word
from kernels.cpu.norms import rms_norm
from kernels.cpu.vectors import LANES, get, load, put, store

# Words of a job. X is the address of the input: plain rows for `multiply_few`, packed panels for `multiply_many`.
X, T, K, Y, STRIDE, RESIDUAL, ACTIVATION, ROWS, MATRICES = range(9)
TABLE = 16
# Words of a matrix in the table: KIND and WEIGHTS say how and where it is stored, N how many rows it has, BIAS where
# its bias lies or 0, COLUMN where its products begin in a row of the output, CHUNK which chunk is its first.
KIND, WEIGHTS, N, BIAS, COLUMN, CHUNK, WIDTH = range(7)
MOST_MATRICES = 8

# Up to so many vectors each is multiplied with the stored rows.
FEW = 8
# Bytes of stored rows in a chunk of `multiply_few`, and what one thread does alone: measured by benchmarks/chunks.py.
# Smaller chunks cost more to hand out than they even out.
CHUNK_BYTES = 64 * 1024
# Rows of a chunk of `multiply_many`, columns that are expanded at a time, and vectors that they are used for: 48 KB of
# weights and 96 KB of sums stay in a core's second-level cache.
MANY_ROWS, DEPTH, SPAN = 48, 256, 512


@jit
def _matrix_of(job: Any, chunk: int) -> int:
    """The word at which the chunk's matrix begins."""
    at = TABLE
    for m in range(1, job[MATRICES]):
        if job[TABLE + m * WIDTH + CHUNK] <= chunk:
            at = TABLE + m * WIDTH
    return at


@task
def multiply_few(job: Any, chunk: int) -> None:
    """`y[t, column + r] = row r . x[t]`, plus bias and residual, for the rows of one chunk and every t."""
    m = _matrix_of(job, chunk)
    first = (chunk - job[m + CHUNK]) * job[ROWS]
    last = min(first + job[ROWS], job[m + N])
    start = job[Y] + 4 * job[m + COLUMN]
    matvecs(job[m + KIND], job[m + WEIGHTS], job[K], job[T], job[X], start, job[STRIDE], first, last)
    for t in range(job[T]):
        place = 4 * (t * job[STRIDE] + job[m + COLUMN])
        y = floats(job[Y] + place)
        if job[m + BIAS] != 0:
            bias = floats(job[m + BIAS])
            for r in range(first, last):
                y[r] += bias[r]
        if job[RESIDUAL] != 0:
            residual = floats(job[RESIDUAL] + place)
            for r in range(first, last):
                y[r] += residual[r]


@task
def multiply_few_gated(job: Any, chunk: int) -> None:
    """`y[t, r] = activation(gate row r . x[t]) * (up row r . x[t])` for the rows of one chunk and every t."""
    first = chunk * job[ROWS]
    n = min(job[ROWS], job[TABLE + N] - first)
    # Rows are rounded up to whole vectors.
    size = (job[ROWS] + LANES - 1) // LANES * LANES
    products = np.zeros(2 * FEW * size, dtype=np.float32)
    for half in range(2):
        m = TABLE + half * WIDTH
        # The kernels write to y[r]; this makes row `first` the first element.
        start = products.ctypes.data + 4 * (half * FEW * size - first)
        matvecs(job[m + KIND], job[m + WEIGHTS], job[K], job[T], job[X], start, size, first, first + n)
    for t in range(job[T]):
        y = floats(job[Y] + 4 * t * job[STRIDE])
        for r in range(0, n, LANES):
            at = t * size + r
            store(products, at, gated(job[ACTIVATION], load(products, at), load(products, at + FEW * size)))
        for r in range(n):
            y[first + r] = products[t * size + r]
    keep_alive(products)


@jit
def _panel_products(
    job: Any, m: int, first: int, n_rows: int, t: int, n_panels: int, weights: Any, sums: Any, place: int, height: int
) -> None:
    """Products of rows of one matrix with the panels from token t on, into rows from `place` of every panel of sums."""
    n_columns = job[K]
    x = floats(job[X])
    for column in range(0, n_columns, DEPTH):
        depth = min(DEPTH, n_columns - column)
        a, at, row = weights, 0, DEPTH
        if job[m + KIND] == F32:
            a, at, row = floats(job[m + WEIGHTS]), first * n_columns + column, n_columns
        else:
            # What comes next is far apart in memory: the next columns of these rows, or the first ones of the next.
            last = column + depth == n_columns
            next_row, next_column = (first + n_rows, 0) if last else (first, column + depth)
            for r in range(n_rows):
                expand(job[m + KIND], job[m + WEIGHTS], n_columns, first + r, column, depth, weights, r * DEPTH)
                ask_for(job[m + KIND], job[m + WEIGHTS], n_columns, next_row + r, next_column, DEPTH)
        for p in range(n_panels):
            panel = ((t // LANES + p) * n_columns + column) * LANES
            multiply_add(a, at, row, 1, n_rows, x, panel, sums, (p * height + place) * LANES, depth)


@task
def multiply_many(job: Any, chunk: int) -> None:
    """What `multiply_few` does, for packed vectors."""
    m = _matrix_of(job, chunk)
    first = (chunk - job[m + CHUNK]) * job[ROWS]
    n_rows = min(job[ROWS], job[m + N] - first)
    weights = np.empty(MANY_ROWS * DEPTH, dtype=np.float32)
    sums = np.empty(MANY_ROWS * SPAN, dtype=np.float32)
    y, residual, bias = floats(job[Y]), floats(job[RESIDUAL]), floats(job[m + BIAS])
    for t in range(0, job[T], SPAN):
        n_tokens = min(SPAN, job[T] - t)
        n_panels = (n_tokens + LANES - 1) // LANES
        sums[: n_panels * n_rows * LANES] = 0
        _panel_products(job, m, first, n_rows, t, n_panels, weights, sums, 0, n_rows)
        for i in range(n_tokens):
            source = (i // LANES) * n_rows * LANES + i % LANES
            target = (t + i) * job[STRIDE] + job[m + COLUMN] + first
            for r in range(n_rows):
                put(y, target + r, get(sums, source + LANES * r))
            if job[m + BIAS] != 0:
                for r in range(n_rows):
                    put(y, target + r, get(y, target + r) + get(bias, first + r))
            if job[RESIDUAL] != 0:
                for r in range(n_rows):
                    put(y, target + r, get(y, target + r) + get(residual, target + r))


@task
def multiply_many_gated(job: Any, chunk: int) -> None:
    """What `multiply_few_gated` does, for packed vectors: half of the rows are the gate's, half those above it."""
    gate, up = TABLE, TABLE + WIDTH
    first = chunk * job[ROWS]
    n_rows = min(job[ROWS], job[gate + N] - first)
    weights = np.empty(MANY_ROWS * DEPTH, dtype=np.float32)
    sums = np.empty(MANY_ROWS * SPAN, dtype=np.float32)
    y = floats(job[Y])
    for t in range(0, job[T], SPAN):
        n_tokens = min(SPAN, job[T] - t)
        n_panels = (n_tokens + LANES - 1) // LANES
        sums[: n_panels * 2 * n_rows * LANES] = 0
        _panel_products(job, gate, first, n_rows, t, n_panels, weights, sums, 0, 2 * n_rows)
        _panel_products(job, up, first, n_rows, t, n_panels, weights, sums, n_rows, 2 * n_rows)
        for p in range(n_panels):
            for r in range(n_rows):
                at = (p * 2 * n_rows + r) * LANES
                store(sums, at, gated(job[ACTIVATION], load(sums, at), load(sums, at + n_rows * LANES)))
        for i in range(n_tokens):
            source = (i // LANES) * 2 * n_rows * LANES + i % LANES
            target = (t + i) * job[STRIDE] + first
            for r in range(n_rows):
                put(y, target + r, get(sums, source + LANES * r))


# Words of a job of `pack_panels`: plain rows in, panels out; with a gain they are normed on the way.
FROM, ROW, LENGTH, GAIN, EPS, TO, TOKENS = range(7)


@task
def pack_panels(job: Any, panel: int) -> None:
    """16 vectors packed for `multiply_many`, normed first if there is a gain."""
    n, t = job[LENGTH], panel * LANES
    n_rows = min(LANES, job[TOKENS] - t)
    x, out = floats(job[FROM] + 4 * t * job[ROW]), floats(job[TO])
    one = np.float32(1)
    if job[GAIN] == 0:
        pack(x, 0, job[ROW], n_rows, n, one, out, panel * LANES * n)
        return
    normed, gain = np.empty(LANES * n, dtype=np.float32), floats(job[GAIN])
    eps = np.float32(number(job[EPS]))
    for r in range(n_rows):
        rms_norm(x, r * job[ROW], n, gain, eps, normed, r * n)
    pack(normed, 0, n, n_rows, n, one, out, panel * LANES * n)


@jit
def project(
    control: Any, few: int, many: int, packing: int, x: Any, gain: Any, eps: Any, table: Any, rows: Any,
    residual: Any, activation: int, y: Any,
) -> None:  # fmt: skip
    """One block: norm (if there is a gain), products with every matrix of the table, and what follows them.

    Args:
        control: the pool's.
        few: address of `multiply_few`, or of its gated form where there is an activation.
        many: address of `multiply_many`, or of its gated form.
        packing: address of `pack_panels`.
        x: (T, K) the input.
        gain: (K,) of the norm, or empty for none.
        eps: of the norm.
        table: (M, WIDTH) the matrices; COLUMN is set, CHUNK is filled in here.
        rows: rows per chunk, for few vectors and for many; and whether products with few vectors are worth handing out.
        residual: (T, N) added to the products, or empty.
        activation: SILU or GELU where two matrices are a gate and what it gates, else 0.
        y: (T, N) the output.
    """
    n_tokens, n_columns = x.shape
    job = control[pool.JOB :]
    source = x
    if n_tokens <= FEW:
        if gain.size:
            source = np.empty_like(x)
            for t in range(n_tokens):
                rms_norm(x.reshape(-1), t * n_columns, n_columns, gain, eps, source.reshape(-1), t * n_columns)
        task_, rows_, address = few, rows[0], source.ctypes.data
        panels = np.empty(0, dtype=np.float32)
    else:
        n_panels = (n_tokens + LANES - 1) // LANES
        panels = np.empty(n_panels * LANES * n_columns, dtype=np.float32)
        task_, rows_, address = many, rows[1], panels.ctypes.data
        job[FROM], job[ROW], job[LENGTH], job[TO], job[TOKENS] = x.ctypes.data, n_columns, n_columns, address, n_tokens
        job[GAIN], job[EPS] = gain.ctypes.data if gain.size else 0, word(eps)
        pool.run(control, packing, n_panels)
    job[X], job[T], job[K], job[Y], job[STRIDE] = address, n_tokens, n_columns, y.ctypes.data, y.shape[1]
    job[RESIDUAL] = residual.ctypes.data if residual.size else 0
    job[ACTIVATION], job[ROWS], job[MATRICES] = activation, rows_, len(table)
    chunks = 0
    for m in range(len(table)):
        at = TABLE + m * WIDTH
        for i in range(WIDTH - 1):
            job[at + i] = table[m, i]
        job[at + CHUNK] = chunks
        if activation == 0 or m == 0:
            chunks += (table[m, N] + rows_ - 1) // rows_
    if n_tokens <= FEW and rows[2] == 0:
        pool.run_alone(control, task_, chunks)
    else:
        pool.run(control, task_, chunks)
    # The arrays must live until here: the job knows them by address alone.
    keep_alive(source)
    keep_alive(panels)
