"""Kernels before attention: norm and rotary embedding of query and key heads, and writing keys and values to slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    HEAD_DIM,
    HEADS_TASK,
    JOB,
    K_HEADS,
    K_NORM_EPS,
    K_NORM_WEIGHT,
    KV_F32,
    Q_HEADS,
    Q_NORM_EPS,
    Q_NORM_WEIGHT,
)
from ..build.memory import floats, number, words
from ..build.vectors import get, put
from ..products.norms import norm_rotate
from .stored import put_row, row_bytes

# Words (int64) of a job (`build/jobs.py`). In the input, tokens are ROW elements apart.
# - For `norm_rope`, WHERE is the address of the tokens' positions (int64), which are row numbers of the cos/sin tables.
#   In the output, tokens are BY_TOKEN elements apart, and the heads of a token are BY_HEAD elements apart. If
#   NORM_WEIGHT is 0, there is no norm.
# - For `put_span`, WHERE is the address of the tokens' slot numbers in the KV store (int64), and TYPE is the store's
#   type. BY_TOKEN is the distance in bytes between slots, and BY_HEAD the distance in bytes between heads.
X, ROW, HEADS, WIDTH, NORM_WEIGHT, NORM_EPS, COS, SIN, WHERE, OUT, TOKENS, BY_TOKEN, BY_HEAD, TYPE = range(14)
# Number of tokens in a chunk of the job.
SPAN = 32


@task
def norm_rope(job: Any, chunk: int, scratch: int) -> None:
    """Normalise (if there is a norm weight) and rotate the heads of SPAN tokens."""
    width = job[WIDTH]
    x, out, cos, sin = floats(job[X]), floats(job[OUT]), floats(job[COS]), floats(job[SIN])
    eps, positions = np.float32(number(job[NORM_EPS]) if job[NORM_WEIGHT] != 0 else -1.0), words(job[WHERE])
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        row = positions[t] * (width // 2)
        norm_rotate(
            x, t * job[ROW], job[HEADS], width, floats(job[NORM_WEIGHT]), eps, cos, sin, row, out, t * job[BY_TOKEN],
            job[BY_HEAD],
        )  # fmt: skip


@jit
def _run(
    control: Any, task: int, x: int, row: int, n_heads: int, width: int, weight: int, eps: int, out: int, by_token: int,
    by_head: int,
) -> None:  # fmt: skip
    job = control[JOB:]
    job[BY_TOKEN], job[BY_HEAD] = by_token, by_head
    job[X], job[ROW], job[OUT], job[HEADS], job[WIDTH] = x, row, out, n_heads, width
    job[NORM_WEIGHT], job[NORM_EPS] = weight, eps
    run(control, task, (job[TOKENS] + SPAN - 1) // SPAN)


@task
def put_span(job: Any, chunk: int, scratch: int) -> None:
    """Write the heads of SPAN tokens to the tokens' slots in the KV store, in the type of the store."""
    slots, width = words(job[WHERE]), job[WIDTH]
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        for h in range(job[HEADS]):
            x, slot = job[X] + 4 * (t * job[ROW] + h * width), job[OUT] + slots[t] * job[BY_TOKEN] + h * job[BY_HEAD]
            if job[TYPE] == KV_F32:
                copy_floats(x, width, slot)
            else:
                put_row(job[TYPE], x, width, slot)


@jit
def copy_floats(x: int, n: int, out: int) -> None:
    """Copy n floats from address `x` to address `out`."""
    source, target = floats(x), floats(out)
    for e in range(n):
        put(target, e, get(source, e))


@entry
def norm_rope_pair(
    address: int, block: int, n_tokens: int, positions: int, q: int, q_row: int, k: int, k_row: int, cos: int, sin: int,
    q_out: int, k_out: int,
) -> None:  # fmt: skip
    """Normalise the heads of queries (T, H, E) and keys (T, G, E), and rotate them by their tokens' positions.

    Args:
        address: address of the thread pool's control block.
        block: address of the words HEADS_TASK, Q_HEADS, ... (`layout.py`).
        n_tokens: T.
        positions: address of the tokens' positions, int64 (T,).
        q: address of the queries.
        q_row: distance between the queries of adjacent tokens, in elements.
        k: address of the keys.
        k_row: distance between the keys of adjacent tokens, in elements.
        cos: address of the table of cosines (number of positions, E / 2).
        sin: address of the table of sines (number of positions, E / 2).
        q_out: address of the rotated queries (T, H, E).
        k_out: address of the rotated keys (T, G, E).
    """
    control, b = words(address), words(block)
    width, job = b[HEAD_DIM], control[JOB:]
    job[TOKENS], job[WHERE], job[COS], job[SIN] = n_tokens, positions, cos, sin
    _run(
        control, b[HEADS_TASK], q, q_row, b[Q_HEADS], width, b[Q_NORM_WEIGHT], b[Q_NORM_EPS], q_out, b[Q_HEADS] * width,
        width,
    )  # fmt: skip
    _run(
        control, b[HEADS_TASK], k, k_row, b[K_HEADS], width, b[K_NORM_WEIGHT], b[K_NORM_EPS], k_out, b[K_HEADS] * width,
        width,
    )  # fmt: skip


@entry
def put_pair(
    address: int, span: int, n_tokens: int, n_heads: int, width: int, k: int, k_row: int, v: int, v_row: int,
    store: int, kind: int, n_slots: int, slots: int,
) -> None:  # fmt: skip
    """Write keys and values (T, G, E) to the tokens' slots in a KV store.

    The store has the shape (2, G, slots, E), or (1, G, slots, E) if it has only keys.

    Args:
        address: address of the thread pool's control block.
        span: address of the task `put_span`.
        n_tokens: T.
        n_heads: G.
        width: E, a multiple of 16, and of 32 if the store is Q8_0.
        k: address of the keys.
        k_row: distance between the keys of adjacent tokens, in elements.
        v: address of the values; 0 if the store has only keys.
        v_row: distance between the values of adjacent tokens, in elements.
        store: address of the store.
        kind: the type of the store, one of the values of `layout.KV_TYPES`.
        n_slots: number of slots in the store.
        slots: address of the tokens' slot numbers, int64 (T,).
    """
    control, by_token = words(address), row_bytes(kind, width)
    by_head = n_slots * by_token
    control[JOB + TOKENS], control[JOB + WHERE], control[JOB + TYPE] = n_tokens, slots, kind
    _run(control, span, k, k_row, n_heads, width, 0, 0, store, by_token, by_head)
    if v != 0:
        _run(control, span, v, v_row, n_heads, width, 0, 0, store + n_heads * by_head, by_token, by_head)
