"""Linear layers: run a block, the matrices that share an input, as a job of the thread pool.

A few input rows are multiplied with weight rows as they are stored (`gemv.py`), more input rows with weight rows that
are expanded to float32 (`gemm.py`). Both give the same bits. With activations in fixed point (`--activations i16`),
quantised matrices are multiplied by the kernels of `fixed_gemv.py` and `fixed.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import entry, jit
from ..build.jobs import run, run_alone, scratch_of
from ..build.layout import (
    CHUNK_GEMM,
    CHUNK_GEMV,
    FIXED,
    FIXED_GEMM,
    FIXED_GEMV,
    FIXED_PREPARE,
    FIXED_RECORDS,
    GEMM_CHUNKS,
    GEMM_TOKENS,
    HAND_OUT,
    HAS_GEMV,
    JOB,
    LANES,
    MATRICES,
    MAX_WAYS,
    NORM_BIAS,
    NORM_EPS,
    NORM_WEIGHT,
    PANEL,
    POST_NORM_BIAS,
    POST_NORM_EPS,
    POST_NORM_WEIGHT,
    ROWS,
    SMALL_BATCH,
    STRETCH,
    TABLE,
    TASK_GEMM,
    TASK_GEMV,
    TASK_PREPARE,
    THREADS,
    WIDTH,
    K,
    N,
    input_row,
)
from ..build.memory import floats, number, words
from ..build.vectors import PART, get, put
from ..formats.format import expand, most_fixed, most_stored
from ..formats.panels import ROWS as PANEL_ROWS
from .fixed_tile import TOKENS
from .gemm import PARTS, PREPARED
from .gemv import pack_panels
from .linear_job import (
    HEIGHT,
    PIECES,
    RESIDUAL,
    SPAN,
    STRIDE,
    WAYS,
    T,
    X,
    Y,
    ceil_div,
    gates,
    number_chunks,
)
from .norms import norm

# A chunk of gemm in fixed point has at most this number of input rows, rounded up to a multiple of TOKENS. The number
# was chosen by measurement.
_FIXED_TOKENS = 256
_row = jit(input_row)
# Bytes of a cache line. A SIMD vector whose address is a multiple of this number is loaded by one access.
_LINE = 4 * LANES


@jit
def _multiply_stored(control: Any, b: Any, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Run gemv: norm the input once, pack it into panels if T > 1, then multiply chunks of weight rows as stored."""
    job, source = control[JOB:], x
    if n_tokens > 1:
        source = scratch
        pack_panels(job, x, scratch, scratch_of(control, 0))
    elif b[NORM_WEIGHT] != 0:
        source = scratch_of(control, control[THREADS])
        norm(floats(x), 0, b[K], b[NORM_WEIGHT], b[NORM_BIAS], np.float32(number(b[NORM_EPS])), floats(source), 0)
    job[X], job[Y], job[RESIDUAL] = source, y, residual
    # Each chunk reads all panels from the L2 cache, STRETCH columns at a time. So with larger chunks, panels are read
    # less often.
    job[HEIGHT] = b[CHUNK_GEMV] if n_tokens == 1 else b[CHUNK_GEMV] * ceil_div(b[K], STRETCH)
    _run_stored(control, b, b[TASK_GEMV])


@jit
def _run_stored(control: Any, b: Any, task: int) -> None:
    """Run a task that multiplies weight rows as they are stored; a chunk has rows from several ranges of its matrix."""
    job = control[JOB:]
    job[WAYS] = MAX_WAYS // 2 if gates(job) else MAX_WAYS
    if b[HAND_OUT] == 0:
        run_alone(control, task, number_chunks(job))
    else:
        run(control, task, number_chunks(job))


@jit
def _multiply_rows(control: Any, b: Any, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Run gemm: norm the input, align its rows with cache lines, then multiply chunks of expanded weight rows."""
    job, is_small = control[JOB:], n_tokens <= SMALL_BATCH
    job[X], job[Y], job[STRIDE] = x, scratch, _row(b[K])
    if PARTS > 1 or b[NORM_WEIGHT] != 0 or job[STRIDE] != b[K] or x % _LINE != 0:
        chunks = ceil_div(n_tokens, PREPARED)
        if is_small:
            run_alone(control, b[TASK_PREPARE], chunks)
        else:
            run(control, b[TASK_PREPARE], chunks)
        job[X] = scratch
    # A chunk multiplies a span of at most GEMM_TOKENS input rows. Make as few spans as possible, of about equal size.
    n_spans = ceil_div(n_tokens, GEMM_TOKENS)
    job[Y], job[RESIDUAL], job[HEIGHT], job[WAYS] = y, residual, b[CHUNK_GEMM], 1
    job[SPAN] = ceil_div(n_tokens, n_spans)
    job[PIECES] = number_chunks(job)
    # Make chunks smaller if there are few per thread, because threads wait for the last chunk.
    while job[PIECES] * n_spans < GEMM_CHUNKS * control[THREADS] and job[HEIGHT] > LANES:
        job[HEIGHT] //= 2
        job[PIECES] = number_chunks(job)
    chunks = job[PIECES] * n_spans
    if is_small and b[HAND_OUT] == 0:
        run_alone(control, b[TASK_GEMM], chunks)
    else:
        run(control, b[TASK_GEMM], chunks)


@jit
def _multiply_fixed_stored(control: Any, b: Any, x: int, residual: int, scratch: int, y: int) -> None:
    """Norm and quantise a few input rows, then multiply them with chunks of weight rows as they are stored."""
    job = control[JOB:]
    job[X], job[Y] = x, scratch
    run_alone(control, b[FIXED_RECORDS], 1)
    job[X], job[Y], job[RESIDUAL], job[HEIGHT] = scratch, y, residual, b[CHUNK_GEMV]
    _run_stored(control, b, b[FIXED_GEMV])


@jit
def _multiply_fixed(control: Any, b: Any, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Multiply in fixed point: few tokens with rows as they are stored, more tokens with expanded panels of rows."""
    job, is_small = control[JOB:], n_tokens <= SMALL_BATCH
    stored = b[HAS_GEMV] != 0
    for m in range(TABLE, TABLE + b[MATRICES] * WIDTH, WIDTH):
        stored = stored and (b[m + PANEL] == 0 or n_tokens <= most_fixed(b, m))
    if stored:
        _multiply_fixed_stored(control, b, x, residual, scratch, y)
        return
    n_groups, n_spans = ceil_div(n_tokens, TOKENS), ceil_div(n_tokens, _FIXED_TOKENS)
    job[X], job[Y], job[SPAN] = x, scratch, ceil_div(n_groups, n_spans)
    if is_small:
        run_alone(control, b[FIXED_PREPARE], n_groups)
    else:
        run(control, b[FIXED_PREPARE], n_groups)
    n_spans = ceil_div(n_groups, job[SPAN])
    job[X], job[Y], job[RESIDUAL], job[WAYS] = scratch, y, residual, 1
    job[HEIGHT] = 2 * ceil_div(b[CHUNK_GEMM], PANEL_ROWS) * PANEL_ROWS
    job[PIECES] = number_chunks(job)
    while job[PIECES] * n_spans < GEMM_CHUNKS * control[THREADS] and job[HEIGHT] > PANEL_ROWS:
        job[HEIGHT] -= PANEL_ROWS
        job[PIECES] = number_chunks(job)
    if is_small and b[HAND_OUT] == 0:
        run_alone(control, b[FIXED_GEMM], job[PIECES] * n_spans)
    else:
        run(control, b[FIXED_GEMM], job[PIECES] * n_spans)


@jit
def _keep(job: Any, b: Any, is_fixed: bool) -> None:
    """Set ROWS to 0 for the matrices that are not in fixed point if `is_fixed`, else for those in fixed point."""
    for at in range(TABLE, TABLE + b[MATRICES] * WIDTH, WIDTH):
        job[at + ROWS] = b[at + ROWS] if (b[at + PANEL] != 0) == is_fixed else 0


@jit
def _norm_add(b: Any, n_tokens: int, y: int, residual: int) -> None:
    """Write `y = residual + norm(y)` row by row, or `y = norm(y)` if `residual` is 0."""
    n, eps, out, added = b[N], np.float32(number(b[POST_NORM_EPS])), floats(y), floats(residual)
    for t in range(n_tokens):
        norm(out, t * n, n, b[POST_NORM_WEIGHT], b[POST_NORM_BIAS], eps, out, t * n)
    if residual != 0:
        for i in range(n_tokens * n):
            put(out, i, get(added, i) + get(out, i))


@entry
def project(address: int, block: int, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Run a block: norm, products with every matrix, bias, activation, norm of the output, residual.

    Args:
        address: address of the thread pool's control block.
        block: address of the block's words (`layout.py`).
        n_tokens: T, the number of input rows.
        x: address of the input, (T, K).
        residual: address of the array (T, N) that is added last, or 0.
        scratch: address, a multiple of 64, of memory for (T, `product_floats(K)`) floats. It is not used if gemv
            multiplies a single token in float32.
        y: address of the output, (T, N). If the block has a norm of the output, `y` must differ from `residual`.
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    for i in range(TABLE + b[MATRICES] * WIDTH):
        job[i] = b[i]
    job[T] = n_tokens
    # A norm of the output needs complete rows, so `_norm_add` runs after all products, and also adds the residual.
    added = residual if b[POST_NORM_WEIGHT] == 0 else 0
    if b[FIXED] != 0:
        _keep(job, b, True)
        _multiply_fixed(control, b, n_tokens, x, added, scratch, y)
    if b[FIXED] != b[MATRICES]:
        _keep(job, b, False)
        stored = b[HAS_GEMV] != 0
        for m in range(b[MATRICES]):
            stored = stored and n_tokens <= most_stored(b, TABLE + m * WIDTH)
        if stored:
            _multiply_stored(control, b, n_tokens, x, added, scratch, y)
        else:
            _multiply_rows(control, b, n_tokens, x, added, scratch, y)
    if b[POST_NORM_WEIGHT] != 0:
        _norm_add(b, n_tokens, y, residual)


# ---- embedding lookup ----


@entry
def embed(address: int, matrix: int, n_columns: int, ids: int, n: int, out: int) -> None:
    """Write row `ids[i]` of a matrix, expanded to float32, to row i of `out` (n, n_columns).

    All arguments but `n_columns` and `n` are addresses: of the thread pool's control block, of the matrix's words, and
    of the arrays `ids` (n,) and `out`.
    """
    control, rows = words(address), words(ids)
    scratch = scratch_of(control, control[THREADS])
    for i in range(n):
        expand(words(matrix), 0, n_columns, rows[i], 0, n_columns, out, i * n_columns, LANES, PART, scratch)
