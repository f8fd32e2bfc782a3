"""Query and key heads: normed, rotated, and put where attention looks for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import entry, jit, task
from kernels.cpu.jobs import run
from kernels.cpu.layout import HEAD_DIM, HEADS_TASK, JOB, K_EPS, K_GAIN, K_HEADS, Q_EPS, Q_GAIN, Q_HEADS
from kernels.cpu.memory import floats, number, words
from kernels.cpu.norms import norm_rotate

# Words of a job: the input has ROW elements per token; OUT takes HEADS x WIDTH of them. A gain of 0 is no norm.
X, ROW, HEADS, WIDTH, GAIN, EPS, COS, SIN, OFFSET, OUT, TOKENS = range(11)
# Tokens of a chunk.
SPAN = 32


@task
def norm_rope(job: Any, chunk: int, scratch: int) -> None:
    """Heads of a span of tokens normed, if there is a gain, and rotated."""
    width = job[WIDTH]
    x, out, cos, sin = floats(job[X]), floats(job[OUT]), floats(job[COS]), floats(job[SIN])
    eps = np.float32(number(job[EPS]) if job[GAIN] != 0 else -1.0)
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        row = (job[OFFSET] + t) * (width // 2)
        norm_rotate(
            x, t * job[ROW], job[HEADS], width, floats(job[GAIN]), eps, cos, sin, row, out, t * job[HEADS] * width
        )


@jit
def _run(control: Any, task: int, x: int, row: int, n_heads: int, width: int, gain: int, eps: int, out: int) -> None:
    job = control[JOB:]
    job[X], job[ROW], job[OUT], job[HEADS], job[WIDTH], job[GAIN], job[EPS] = x, row, out, n_heads, width, gain, eps
    run(control, task, (job[TOKENS] + SPAN - 1) // SPAN)


@entry
def norm_rope_pair(
    address: int, block: int, n_tokens: int, offset: int, q: int, q_row: int, k: int, k_row: int, cos: int, sin: int,
    q_out: int, k_out: int,
) -> None:  # fmt: skip
    """(T, H, E) and (T, K, E) heads from rows of queries and keys; row t is at position `offset + t` of the tables.

    Args:
        address: of the pool's control block.
        block: address of the words that `layout.py` names.
        n_tokens: T.
        offset: position of the first token.
        q: address of the queries.
        q_row: elements from one row of queries to the next.
        k: address of the keys.
        k_row: elements from one row of keys to the next.
        cos: address of the cosines, (positions, E / 2).
        sin: address of the sines.
        q_out: address of (T, H, E).
        k_out: address of (T, K, E).
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    job[TOKENS], job[OFFSET], job[COS], job[SIN] = n_tokens, offset, cos, sin
    _run(control, b[HEADS_TASK], q, q_row, b[Q_HEADS], b[HEAD_DIM], b[Q_GAIN], b[Q_EPS], q_out)
    _run(control, b[HEADS_TASK], k, k_row, b[K_HEADS], b[HEAD_DIM], b[K_GAIN], b[K_EPS], k_out)
