"""Query and key heads: normed, rotated, and put where attention looks for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import entry, jit, task
from kernels.cpu.jobs import run
from kernels.cpu.layout import HEAD_DIM, HEADS_TASK, JOB, K_EPS, K_GAIN, K_HEADS, Q_EPS, Q_GAIN, Q_HEADS
from kernels.cpu.memory import floats, number, words
from kernels.cpu.norms import norm_rotate
from kernels.cpu.vectors import get, put

# Words of a job: the input has ROW elements per token; in the output BY_TOKEN elements lie from one token to the next,
# and BY_HEAD from one head to the next. A gain of 0 is no norm.
X, ROW, HEADS, WIDTH, GAIN, EPS, COS, SIN, OFFSET, OUT, TOKENS, BY_TOKEN, BY_HEAD = range(13)
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
            x, t * job[ROW], job[HEADS], width, floats(job[GAIN]), eps, cos, sin, row, out, t * job[BY_TOKEN],
            job[BY_HEAD],
        )  # fmt: skip


@jit
def _run(
    control: Any, task: int, x: int, row: int, n_heads: int, width: int, gain: int, eps: int, out: int, by_token: int,
    by_head: int,
) -> None:  # fmt: skip
    job = control[JOB:]
    job[BY_TOKEN], job[BY_HEAD] = by_token, by_head
    job[X], job[ROW], job[OUT], job[HEADS], job[WIDTH], job[GAIN], job[EPS] = x, row, out, n_heads, width, gain, eps
    run(control, task, (job[TOKENS] + SPAN - 1) // SPAN)


@jit
def norm_rope_to(
    address: int, block: int, n_tokens: int, offset: int, q: int, q_row: int, k: int, k_row: int, cos: int, sin: int,
    q_out: int, k_out: int,
) -> None:  # fmt: skip
    """What `norm_rope_pair` does, for other compiled code."""
    control, b = words(address), words(block)
    width, job = b[HEAD_DIM], control[JOB:]
    job[TOKENS], job[OFFSET], job[COS], job[SIN] = n_tokens, offset, cos, sin
    _run(control, b[HEADS_TASK], q, q_row, b[Q_HEADS], width, b[Q_GAIN], b[Q_EPS], q_out, b[Q_HEADS] * width, width)
    _run(control, b[HEADS_TASK], k, k_row, b[K_HEADS], width, b[K_GAIN], b[K_EPS], k_out, b[K_HEADS] * width, width)


@task
def put_span(job: Any, chunk: int, scratch: int) -> None:
    """Heads of a span of tokens as they are."""
    t = chunk * SPAN
    n_tokens = min(SPAN, job[TOKENS] - t)
    x, out = floats(job[X] + 4 * t * job[ROW]), floats(job[OUT] + 4 * t * job[BY_TOKEN])
    put_heads(x, job[ROW], n_tokens, job[HEADS], job[WIDTH], out, job[BY_TOKEN], job[BY_HEAD])


@jit
def put_heads(x: Any, row: int, n_tokens: int, n_heads: int, width: int, out: Any, by_token: int, by_head: int) -> None:
    """Heads as they are, from rows `row` elements apart to where they are `by_token` and `by_head` elements apart."""
    for t in range(n_tokens):
        for h in range(n_heads):
            for e in range(width):
                put(out, t * by_token + h * by_head + e, get(x, t * row + h * width + e))


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
    norm_rope_to(address, block, n_tokens, offset, q, q_row, k, k_row, cos, sin, q_out, k_out)


@entry
def put_pair(
    address: int, span: int, n_tokens: int, n_heads: int, width: int, k: int, k_row: int, v: int, v_row: int,
    k_out: int, v_out: int, by_head: int,
) -> None:  # fmt: skip
    """Keys and values as they are, from (T, K, E) to where attention looks for them.

    Args:
        address: of the pool's control block.
        span: address of `put_span`.
        n_tokens: T.
        n_heads: K.
        width: E.
        k: address of the keys.
        k_row: elements from the keys of one token to those of the next.
        v: address of the values.
        v_row: elements from the values of one token to those of the next.
        k_out: address of the first token's place among the keys of the first head.
        v_out: address of the first token's place among the values of the first head.
        by_head: elements from one head's place to the next one's.
    """
    control = words(address)
    control[JOB + TOKENS] = n_tokens
    _run(control, span, k, k_row, n_heads, width, 0, 0, k_out, width, by_head)
    _run(control, span, v, v_row, n_heads, width, 0, 0, v_out, width, by_head)
