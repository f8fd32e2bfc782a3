"""The state space model of Mamba2 (SSD), its gate, and the norm of its output.

Tokens are applied sequentially, not in chunks as in the SSD algorithm. In this file, a chunk is a thread's unit of
work: in `space_head` one of the H heads, for all tokens of the pass, and in `space_norm` TOKENS tokens. A run is
consecutive rows of one sequence (`layout.py`).

The state of a head is a matrix (N, P) with state size N and head dim P. Each token multiplies the matrix by the token's
decay, and adds the outer product of the token's B and input, times the time step. The token's output is its C times the
new matrix. For each of the P columns, sums run over the N rows in order, so the bits do not depend on the number of
tokens in a pass. `_four` reads and writes the matrix once for four tokens, with the same bits as four calls of `_one`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    JOB,
    LANES,
    RUN_FIRST,
    RUN_ROWS,
    RUN_SOURCE,
    RUN_TARGET,
    RUN_WIDTH,
    SPACE_BIAS,
    SPACE_EPS,
    SPACE_GROUPS,
    SPACE_HEAD_DIM,
    SPACE_HEADS,
    SPACE_NORM,
    SPACE_NORM_GROUPS,
    SPACE_NORM_TASK,
    SPACE_RATE,
    SPACE_SKIP,
    SPACE_STATE_DIM,
    SPACE_TASK,
)
from ..build.memory import floats, number, words
from ..build.vectors import fma, get, load, load_splat, mul, put, store, zeros
from ..products.activations import silu
from ..products.norms import rms_norm
from .delta_rule import exp_one, softplus

# Words of a job: the arguments of `state_space`.
X, GATE, GATE_ROW, STEP, STEP_ROW, BLOCK, STORE, RUNS, N_RUNS, OUT, ROWS = range(11)
# PIECE: number of tokens whose decays are prepared at a time. TOKENS: number of tokens in a chunk of the norm.
PIECE, TOKENS = 32, 8


@jit
def _one(m: Any, source: int, to: int, apart: int, n: int, x: Any, b: int, c: int, v: int, of: Any, at: int, out: Any,
         y: int) -> None:  # fmt: skip
    """Apply one token to 16 columns of a head's matrix; write the token's output for these columns.

    In the states m, the old matrix is read from index `source` on, and the new matrix is written from index `to` on.
    Both are indices of the element in row 0 and the first of the 16 columns. The n = N rows are `apart` elements apart.
    In x, the output of the convolution, the token's B is at index b, its C at c, and its input for the first column at
    v. In `of`, written by `_prepare`, the token's decay is at index `at`, and its time step at `at + 1`. Its output for
    the first column is written to index y of `out`.
    """
    decay, added, sum_ = load_splat(of, at), mul(load_splat(of, at + 1), load(x, v)), zeros()
    for e in range(n):
        new = fma(load_splat(x, b + e), added, mul(decay, load(m, source + e * apart)))
        store(m, to + e * apart, new)
        sum_ = fma(load_splat(x, c + e), new, sum_)
    store(out, y, sum_)


@jit
def _wide(m: Any, source: int, to: int, apart: int, n: int, x: Any, b: int, c: int, v: int, of: Any, at: int, out: Any,
          y: int) -> None:  # fmt: skip
    """Apply one token to 64 columns; the arguments are those of `_one`."""
    decay, time = load_splat(of, at), load_splat(of, at + 1)
    a0, a1 = mul(time, load(x, v)), mul(time, load(x, v + LANES))
    a2, a3 = mul(time, load(x, v + 2 * LANES)), mul(time, load(x, v + 3 * LANES))
    s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
    for e in range(n):
        row, now = source + e * apart, to + e * apart
        add, read = load_splat(x, b + e), load_splat(x, c + e)
        new = fma(add, a0, mul(decay, load(m, row)))
        store(m, now, new)
        s0 = fma(read, new, s0)
        new = fma(add, a1, mul(decay, load(m, row + LANES)))
        store(m, now + LANES, new)
        s1 = fma(read, new, s1)
        new = fma(add, a2, mul(decay, load(m, row + 2 * LANES)))
        store(m, now + 2 * LANES, new)
        s2 = fma(read, new, s2)
        new = fma(add, a3, mul(decay, load(m, row + 3 * LANES)))
        store(m, now + 3 * LANES, new)
        s3 = fma(read, new, s3)
    store(out, y, s0)
    store(out, y + LANES, s1)
    store(out, y + 2 * LANES, s2)
    store(out, y + 3 * LANES, s3)


@jit
def _four(m: Any, source: int, to: int, apart: int, n: int, x: Any, x_row: int, b: int, c: int, v: int, of: Any,
          at: int, out: Any, y: int, y_row: int) -> None:  # fmt: skip
    """Apply four tokens to 16 columns; the arguments are those of `_one` for the first of the tokens.

    The rows of the tokens are `x_row` elements apart in x, and `y_row` elements apart in the output.
    """
    d0, d1, d2, d3 = load_splat(of, at), load_splat(of, at + 2), load_splat(of, at + 4), load_splat(of, at + 6)
    a0, a1 = mul(load_splat(of, at + 1), load(x, v)), mul(load_splat(of, at + 3), load(x, v + x_row))
    a2 = mul(load_splat(of, at + 5), load(x, v + 2 * x_row))
    a3 = mul(load_splat(of, at + 7), load(x, v + 3 * x_row))
    s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
    b1, b2, b3 = b + x_row, b + 2 * x_row, b + 3 * x_row
    c1, c2, c3 = c + x_row, c + 2 * x_row, c + 3 * x_row
    for e in range(n):
        new = fma(load_splat(x, b + e), a0, mul(d0, load(m, source + e * apart)))
        s0 = fma(load_splat(x, c + e), new, s0)
        new = fma(load_splat(x, b1 + e), a1, mul(d1, new))
        s1 = fma(load_splat(x, c1 + e), new, s1)
        new = fma(load_splat(x, b2 + e), a2, mul(d2, new))
        s2 = fma(load_splat(x, c2 + e), new, s2)
        new = fma(load_splat(x, b3 + e), a3, mul(d3, new))
        s3 = fma(load_splat(x, c3 + e), new, s3)
        store(m, to + e * apart, new)
    store(out, y, s0)
    store(out, y + y_row, s1)
    store(out, y + 2 * y_row, s2)
    store(out, y + 3 * y_row, s3)


@jit
def _prepare(job: Any, block: Any, head: int, t: int, of: Any, at: int) -> None:
    """Write the decay `exp(rate * dt)` of token t, and `dt = softplus(step + bias)`, to of[at:]."""
    step = get(floats(job[STEP]), t * job[STEP_ROW] + head) + get(floats(block[SPACE_BIAS]), head)
    time = softplus(step)
    put(of, at, exp_one(np.float64(get(floats(block[SPACE_RATE]), head)) * time))
    put(of, at + 1, np.float32(time))


@jit
def _piece(job: Any, block: Any, head: int, first: int, n: int, source: int, target: int, of: Any) -> None:
    """Apply n tokens, from row `first` on, to a head's matrix; read it at index `source`, write it at `target`."""
    N, P, H, G = block[SPACE_STATE_DIM], block[SPACE_HEAD_DIM], block[SPACE_HEADS], block[SPACE_GROUPS]
    m, x, out = floats(job[STORE]), floats(job[X]), floats(job[OUT])
    row, width = (H * P + 2 * G * N), H * P
    b = width + head * G // H * N
    for t in range(n):
        _prepare(job, block, head, first + t, of, 2 * t)
    for column in range(0, P, LANES):
        t, read, to = 0, source + column, target + column
        v, y = first * row + head * P + column, first * width + head * P + column
        while t + 4 <= n:
            at = (first + t) * row + b
            _four(m, read, to, P, N, x, row, at, at + G * N, v + t * row, of, 2 * t, out, y + t * width, width)
            t, read = t + 4, to
        # If n is 1, the token is applied to 64 columns at a time, and to the rest of the columns 16 at a time.
        if n == 1 and column % (4 * LANES) == 0 and column + 4 * LANES <= P:
            at = first * row + b
            _wide(m, read, to, P, N, x, at, at + G * N, v, of, 0, out, y)
        elif n > 1 or column >= P // (4 * LANES) * (4 * LANES):
            while t < n:
                at = (first + t) * row + b
                _one(m, read, to, P, N, x, at, at + G * N, v + t * row, of, 2 * t, out, y + t * width)
                t, read = t + 1, to


@jit
def _gate(job: Any, block: Any, head: int, first: int, n: int) -> None:
    """Add the input times the head's skip weight to the output, and multiply the sum with the SiLU of the gate."""
    P, H = block[SPACE_HEAD_DIM], block[SPACE_HEADS]
    x, out, gate = floats(job[X]), floats(job[OUT]), floats(job[GATE])
    row, skip = H * P + 2 * block[SPACE_GROUPS] * block[SPACE_STATE_DIM], load_splat(floats(block[SPACE_SKIP]), head)
    for t in range(first, first + n):
        for i in range(head * P, head * P + P, LANES):
            y = fma(skip, load(x, t * row + i), load(out, t * H * P + i))
            store(out, t * H * P + i, mul(y, silu(load(gate, t * job[GATE_ROW] + i))))


@task
def space_head(job: Any, chunk: int, scratch: int) -> None:
    """Compute the output of the head with index `chunk`, for all runs."""
    block, runs, of = words(job[BLOCK]), words(job[RUNS]), floats(scratch)
    size = block[SPACE_STATE_DIM] * block[SPACE_HEAD_DIM]
    for i in range(job[N_RUNS]):
        a = runs[i * RUN_WIDTH :]
        target = (a[RUN_TARGET] * block[SPACE_HEADS] + chunk) * size
        source, end = (a[RUN_SOURCE] * block[SPACE_HEADS] + chunk) * size, a[RUN_FIRST] + a[RUN_ROWS]
        for first in range(a[RUN_FIRST], end, PIECE):
            n = min(PIECE, end - first)
            _piece(job, block, chunk, first, n, source, target, of)
            _gate(job, block, chunk, first, n)
            source = target


@task
def space_norm(job: Any, chunk: int, scratch: int) -> None:
    """Apply an RMS norm to each group of columns of the output, for TOKENS tokens."""
    block, out = words(job[BLOCK]), floats(job[OUT])
    width, n_groups = block[SPACE_HEADS] * block[SPACE_HEAD_DIM], block[SPACE_NORM_GROUPS]
    size, eps = width // n_groups, np.float32(number(block[SPACE_EPS]))
    for t in range(chunk * TOKENS, min((chunk + 1) * TOKENS, job[ROWS])):
        for group in range(n_groups):
            at = t * width + group * size
            rms_norm(out, at, size, floats(block[SPACE_NORM] + 4 * group * size), eps, out, at)


@entry
def state_space(
    address: int, block: int, n_rows: int, x: int, gate: int, gate_row: int, step: int, step_row: int, states: int,
    runs: int, n_runs: int, out: int,
) -> None:  # fmt: skip
    """Compute the state space of Mamba2, multiply its output with the SiLU of its gate, and norm the product.

    If the word SPACE_NORM is 0, the product is not normed. `n_rows` is the number of tokens T. P is a multiple of 16.
    `gate_row` and `step_row` are distances in elements from row to row. These arguments are addresses:

    - address: the thread pool's control block. block: the words of the state space (`layout.py`)
    - x: T contiguous rows, each with the inputs, B and C of a token
    - gate: the gate, (T, H * P). step: the time step (dt) before its bias and softplus, (T, H)
    - states: the states, (slots, H, N, P). runs: the runs, int64 (n_runs, RUN_WIDTH)
    - out: the contiguous output, (T, H * P)
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    job[X], job[GATE], job[GATE_ROW], job[STEP], job[STEP_ROW] = x, gate, gate_row, step, step_row
    job[BLOCK], job[STORE], job[RUNS], job[N_RUNS], job[OUT], job[ROWS] = block, states, runs, n_runs, out, n_rows
    run(control, b[SPACE_TASK], b[SPACE_HEADS])
    if b[SPACE_NORM] != 0:
        run(control, b[SPACE_NORM_TASK], (n_rows + TOKENS - 1) // TOKENS)
