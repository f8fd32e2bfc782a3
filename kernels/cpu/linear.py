"""Linear layers: several matrices with the same input in one job, and what is done with their products.

For few vectors every row is multiplied as it is stored (`few.py`), for many, rows are expanded first (`many.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import entry, jit
from kernels.cpu.jobs import run, run_alone, scratch_of
from kernels.cpu.layout import (
    CHUNK_FEW,
    CHUNK_MANY,
    EPS,
    FEW,
    GAIN,
    HAND_OUT,
    JOB,
    LANES,
    MANY_CHUNKS,
    MANY_TOKENS,
    MATRICES,
    POST_EPS,
    POST_GAIN,
    POST_SHIFT,
    SHIFT,
    TABLE,
    TASK_FEW,
    TASK_MANY,
    TASK_PACK,
    THREADS,
    WIDTH,
    K,
    N,
)
from kernels.cpu.linear_job import HEIGHT, PIECES, RESIDUAL, SPAN, T, X, Y, number_chunks
from kernels.cpu.memory import floats, number, words
from kernels.cpu.norms import norm
from kernels.cpu.vectors import get, put


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
    chunks = number_chunks(job)
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
    job[PIECES] = number_chunks(job)
    if job[PIECES] * n_spans < MANY_CHUNKS:
        job[HEIGHT] //= 2
        job[PIECES] = number_chunks(job)
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
