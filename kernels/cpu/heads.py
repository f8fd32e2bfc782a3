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
# and BY_HEAD from one head to the next. A gain of 0 is no norm. WHERE is the address of a number for each token: its
# row in the tables of cosines and sines, or its slot.
X, ROW, HEADS, WIDTH, GAIN, EPS, COS, SIN, WHERE, OUT, TOKENS, BY_TOKEN, BY_HEAD = range(13)
# Tokens of a chunk.
SPAN = 32


@task
def norm_rope(job: Any, chunk: int, scratch: int) -> None:
    """Heads of a span of tokens normed, if there is a gain, and rotated."""
    width = job[WIDTH]
    x, out, cos, sin = floats(job[X]), floats(job[OUT]), floats(job[COS]), floats(job[SIN])
    eps, positions = np.float32(number(job[EPS]) if job[GAIN] != 0 else -1.0), words(job[WHERE])
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        row = positions[t] * (width // 2)
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
    address: int, block: int, n_tokens: int, positions: int, q: int, q_row: int, k: int, k_row: int, cos: int, sin: int,
    q_out: int, k_out: int,
) -> None:  # fmt: skip
    """What `norm_rope_pair` does, for other compiled code."""
    control, b = words(address), words(block)
    width, job = b[HEAD_DIM], control[JOB:]
    job[TOKENS], job[WHERE], job[COS], job[SIN] = n_tokens, positions, cos, sin
    _run(control, b[HEADS_TASK], q, q_row, b[Q_HEADS], width, b[Q_GAIN], b[Q_EPS], q_out, b[Q_HEADS] * width, width)
    _run(control, b[HEADS_TASK], k, k_row, b[K_HEADS], width, b[K_GAIN], b[K_EPS], k_out, b[K_HEADS] * width, width)


@task
def put_span(job: Any, chunk: int, scratch: int) -> None:
    """Heads of a span of tokens as they are, each token's to its slot."""
    x, out, slots = floats(job[X]), floats(job[OUT]), words(job[WHERE])
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        put_heads(x, t * job[ROW], job[HEADS], job[WIDTH], out, slots[t] * job[BY_TOKEN], job[BY_HEAD])


@jit
def put_heads(x: Any, at: int, n_heads: int, width: int, out: Any, to: int, by_head: int) -> None:
    """One token's heads as they are, from x[at ...] to where they are `by_head` elements apart from out[to] on."""
    for h in range(n_heads):
        for e in range(width):
            put(out, to + h * by_head + e, get(x, at + h * width + e))


@entry
def norm_rope_pair(
    address: int, block: int, n_tokens: int, positions: int, q: int, q_row: int, k: int, k_row: int, cos: int, sin: int,
    q_out: int, k_out: int,
) -> None:  # fmt: skip
    """(T, H, E) and (T, G, E) heads from rows of queries and keys, each rotated by its token's position.

    Args:
        address: of the pool's control block.
        block: address of the words that `layout.py` names.
        n_tokens: T.
        positions: address of the tokens' positions, 64-bit integers (T,).
        q: address of the queries.
        q_row: elements from one row of queries to the next.
        k: address of the keys.
        k_row: elements from one row of keys to the next.
        cos: address of the cosines, (positions, E / 2).
        sin: address of the sines.
        q_out: address of (T, H, E).
        k_out: address of (T, G, E).
    """
    norm_rope_to(address, block, n_tokens, positions, q, q_row, k, k_row, cos, sin, q_out, k_out)


@entry
def put_pair(
    address: int, span: int, n_tokens: int, n_heads: int, width: int, k: int, k_row: int, v: int, v_row: int,
    k_out: int, v_out: int, by_head: int, slots: int,
) -> None:  # fmt: skip
    """Keys and values as they are, from (T, G, E) to the tokens' slots.

    Args:
        address: of the pool's control block.
        span: address of `put_span`.
        n_tokens: T.
        n_heads: G.
        width: E.
        k: address of the keys.
        k_row: elements from the keys of one token to those of the next.
        v: address of the values.
        v_row: elements from the values of one token to those of the next.
        k_out: address of slot 0 of the keys of the first head.
        v_out: address of slot 0 of the values of the first head.
        by_head: elements from one head's slots to the next one's.
        slots: address of the tokens' slots, 64-bit integers (T,).
    """
    control = words(address)
    control[JOB + TOKENS], control[JOB + WHERE] = n_tokens, slots
    _run(control, span, k, k_row, n_heads, width, 0, 0, k_out, width, by_head)
    _run(control, span, v, v_row, n_heads, width, 0, 0, v_out, width, by_head)
