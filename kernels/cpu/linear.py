"""Linear layers: several matrices with the same input in one job, and what is done with their products.

For few vectors every row is multiplied as it is stored: memory is the limit. For many, rows are expanded a piece at a
time, while they fit a core's own cache, and multiplied in registers: arithmetic is the limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.activations import activate, gated
from kernels.cpu.formats import ask_for, expand, matvecs
from kernels.cpu.gemm import multiply_add, pack
from kernels.cpu.jit import entry, jit, task
from kernels.cpu.jobs import run, run_alone, scratch_of
from kernels.cpu.layout import (
    ACTIVATION,
    BIAS,
    CHUNK,
    CHUNK_FEW,
    CHUNK_MANY,
    COLUMN,
    EPS,
    FEW,
    GAIN,
    HAND_OUT,
    JOB,
    KIND,
    LANES,
    MANY_CHUNKS,
    MANY_ROWS,
    MANY_TOKENS,
    MATRICES,
    OWN,
    POST_EPS,
    POST_GAIN,
    POST_SHIFT,
    ROWS,
    SHIFT,
    TABLE,
    TASK_FEW,
    TASK_MANY,
    TASK_PACK,
    THREADS,
    WEIGHTS,
    WIDTH,
    K,
    N,
)
from kernels.cpu.memory import floats, number, words
from kernels.cpu.norms import norm
from kernels.cpu.vectors import get, load, put, store, store_columns

# Words of a job: the block's, and X, the address of the input (plain rows for few vectors, packed panels for many), T,
# how many vectors there are, Y and RESIDUAL, where the output and what is added to it lie, and HEIGHT, rows of a chunk.
# A job with many vectors has PIECES chunks for each SPAN of them; one with few has one span.
X, T, Y, RESIDUAL, HEIGHT, PIECES, SPAN = range(OWN, OWN + 7)

# Columns that are expanded at a time.
DEPTH = 256


@jit
def _matrix_of(job: Any, chunk: int) -> int:
    """The word at which the chunk's matrix begins."""
    at = TABLE
    for m in range(1, job[MATRICES]):
        if job[TABLE + m * WIDTH + CHUNK] <= chunk:
            at = TABLE + m * WIDTH
    return at


@jit
def _activate_some(activation: int, y: Any, first: int, last: int, room: Any) -> None:
    """Elements first to last - 1 of y activated; `room` takes a vector, for what follows them is not ours."""
    for i in range(first, last, LANES):
        n = min(LANES, last - i)
        for lane in range(n):
            put(room, lane, get(y, i + lane))
        store(room, 0, activate(activation, load(room, 0)))
        for lane in range(n):
            put(y, i + lane, get(room, lane))


@task
def multiply_few(job: Any, chunk: int, scratch: int) -> None:
    """`y[t, column + r] = row r . x[t]`, plus bias, activated, plus residual, for the rows of one chunk and every t."""
    m = _matrix_of(job, chunk)
    first = (chunk - job[m + CHUNK]) * job[HEIGHT]
    last = min(first + job[HEIGHT], job[m + ROWS])
    start = job[Y] + 4 * job[m + COLUMN]
    matvecs(job[m + KIND], job[m + WEIGHTS], job[K], job[T], job[X], start, job[N], first, last, scratch)
    for t in range(job[T]):
        place = 4 * (t * job[N] + job[m + COLUMN])
        y = floats(job[Y] + place)
        if job[m + BIAS] != 0:
            bias = floats(job[m + BIAS])
            for r in range(first, last):
                y[r] += bias[r]
        if job[ACTIVATION] != 0:
            _activate_some(job[ACTIVATION], y, first, last, floats(scratch))
        if job[RESIDUAL] != 0:
            residual = floats(job[RESIDUAL] + place)
            for r in range(first, last):
                y[r] += residual[r]


@task
def multiply_few_gated(job: Any, chunk: int, scratch: int) -> None:
    """`y[t, r] = activation(gate row r . x[t]) * (up row r . x[t])` for the rows of one chunk and every t."""
    first = chunk * job[HEIGHT]
    n = min(job[HEIGHT], job[TABLE + ROWS] - first)
    # Rows are rounded up to whole vectors.
    size = (job[HEIGHT] + LANES - 1) // LANES * LANES
    products = floats(scratch)  # (2, FEW, size)
    products[: 2 * FEW * size] = 0
    room = scratch + 4 * 2 * FEW * size
    for half in range(2):
        m = TABLE + half * WIDTH
        # The kernels write to y[r]; this makes row `first` the first element.
        start = scratch + 4 * (half * FEW * size - first)
        matvecs(job[m + KIND], job[m + WEIGHTS], job[K], job[T], job[X], start, size, first, first + n, room)
    for t in range(job[T]):
        y = floats(job[Y] + 4 * t * job[N])
        for r in range(0, n, LANES):
            at = t * size + r
            store(products, at, gated(job[ACTIVATION], load(products, at), load(products, at + FEW * size)))
        for r in range(n):
            y[first + r] = products[t * size + r]


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
    m = _matrix_of(job, piece)
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


@jit
def _number_chunks(job: Any, rows: int) -> int:
    """Say of each matrix which chunk is its first; how many there are. A gate's rows are those of what it gates."""
    chunks = 0
    for m in range(job[MATRICES]):
        at = TABLE + m * WIDTH
        job[at + CHUNK] = chunks
        if job[ACTIVATION] == 0 or m == 0:
            chunks += (job[at + ROWS] + rows - 1) // rows
    return chunks


@jit
def _project_few(control: Any, b: Any, n_tokens: int, x: int, residual: int, y: int) -> None:
    """The input normed here, once, then chunks of stored rows."""
    job, source = control[JOB:], x
    if b[GAIN] != 0:
        source = scratch_of(control, control[THREADS])
        for t in range(n_tokens):
            at, eps = t * b[K], np.float32(number(b[EPS]))
            norm(floats(x), at, b[K], b[GAIN], b[SHIFT], eps, floats(source), at)
    job[X], job[Y], job[RESIDUAL], job[HEIGHT] = source, y, residual, b[CHUNK_FEW]
    chunks = _number_chunks(job, b[CHUNK_FEW])
    if b[HAND_OUT] == 0:
        run_alone(control, b[TASK_FEW], chunks)
    else:
        run(control, b[TASK_FEW], chunks)


@jit
def _project_many(control: Any, b: Any, n_tokens: int, x: int, residual: int, panels: int, y: int) -> None:
    """The input normed and packed, a panel in a chunk, then chunks of expanded rows."""
    job = control[JOB:]
    job[X], job[Y] = x, panels
    n_panels = (n_tokens + LANES - 1) // LANES
    run(control, b[TASK_PACK], n_panels)
    # As many spans as needed, and of one size: whole panels.
    n_spans = (n_tokens + MANY_TOKENS - 1) // MANY_TOKENS
    job[X], job[Y], job[RESIDUAL], job[HEIGHT] = panels, y, residual, b[CHUNK_MANY]
    job[SPAN] = (n_panels + n_spans - 1) // n_spans * LANES
    job[PIECES] = _number_chunks(job, job[HEIGHT])
    if job[PIECES] * n_spans < MANY_CHUNKS:
        job[HEIGHT] //= 2
        job[PIECES] = _number_chunks(job, job[HEIGHT])
    run(control, b[TASK_MANY], job[PIECES] * ((n_tokens + job[SPAN] - 1) // job[SPAN]))


@jit
def _norm_add(b: Any, n_tokens: int, y: int, residual: int) -> None:
    """`y = residual + norm(y)`, row by row."""
    n, eps, out, added = b[N], np.float32(number(b[POST_EPS])), floats(y), floats(residual)
    for t in range(n_tokens):
        norm(out, t * n, n, b[POST_GAIN], b[POST_SHIFT], eps, out, t * n)
    for i in range(n_tokens * n):
        put(out, i, get(added, i) + get(out, i))


@entry
def project(address: int, block: int, n_tokens: int, x: int, residual: int, panels: int, y: int) -> None:
    """One block: norm (if there is a gain), products with every matrix of the table, and what follows them.

    Args:
        address: of the pool's control block.
        block: address of the words that `layout.py` names.
        n_tokens: T.
        x: address of the input, (T, K).
        residual: address of what is added to the products, (T, N), or 0.
        panels: address of room for (T rounded up to 16, K) floats; for more than `FEW` tokens alone.
        y: address of the output, (T, N); where the products are normed it must not be the residual's.
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    for i in range(TABLE + b[MATRICES] * WIDTH):
        job[i] = b[i]
    job[T] = n_tokens
    # What is normed is whole only when the job is done.
    added = residual if b[POST_GAIN] == 0 else 0
    if n_tokens > FEW:
        _project_many(control, b, n_tokens, x, added, panels, y)
    else:
        _project_few(control, b, n_tokens, x, added, y)
    if b[POST_GAIN] != 0:
        _norm_add(b, n_tokens, y, residual)
