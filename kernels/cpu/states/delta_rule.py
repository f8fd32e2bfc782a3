"""The gated delta rule (the mixer of Qwen3-Next and Qwen3.5) with its output norm and gate.

A chunk of the job, a thread's unit of work, is one value head for all tokens of the pass. The state of a head is a
matrix (E, P), with a row per element of a key and a column per element of a value. Each token decays the matrix,
corrects the value that the matrix stores for the token's key, and reads the matrix with the token's query. For each of
the P columns, sums run over the E rows in order, so the bits do not depend on the number of tokens in a pass. The
columns are independent of each other. The kernel applies up to PIECE tokens to 64 columns before it begins the next 64
columns, so that the columns stay in the L1 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.exponentials import exp
from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    DELTA_BIAS,
    DELTA_EPS,
    DELTA_KEY_DIM,
    DELTA_KEYS,
    DELTA_NORM,
    DELTA_RATE,
    DELTA_SHARED,
    DELTA_TASK,
    DELTA_VALUE_DIM,
    DELTA_VALUES,
    JOB,
    LANES,
    RUN_FIRST,
    RUN_ROWS,
    RUN_SOURCE,
    RUN_TARGET,
    RUN_WIDTH,
)
from ..build.memory import floats, number, words
from ..build.vectors import div, fma, get, largest_lane, load, load_splat, mul, put, splat, store, sub, zeros
from ..formats.float32 import dot
from ..products.activations import silu
from ..products.norms import rms_norm

# Words of a job: the arguments of `delta_net`.
X, GATE, GATE_ROW, BETA, BETA_ROW, STEP, STEP_ROW, BLOCK, STORE, RUNS, N_RUNS, OUT = range(12)
# Number of tokens whose queries and keys are prepared at a time.
PIECE = 32
# Added to the squared lengths of queries and keys before the square root.
TINY = 1e-6


@jit
def exp_one(x: Any) -> Any:
    """Return `e**x` of one float32."""
    return largest_lane(exp(splat(np.float32(x))))


@jit
def softplus(x: Any) -> Any:
    """Return `log(1 + e**x)` as float64, computed as `max(x, 0) + log1p(u)` with `u = e**-|x|`.

    `log1p(u)` is computed as `2 atanh(u / (2 + u))`, by the series of atanh.
    """
    u = np.float64(exp_one(-abs(x)))
    s = u / (2.0 + u)
    square, power, sum_ = s * s, s, s
    for i in range(3, 25, 2):
        power *= square
        sum_ += power / i
    return max(np.float64(x), 0.0) + 2.0 * sum_


@jit
def _scaled(x: Any, at: int, n: int, factor: Any, out: Any, to: int) -> None:
    """L2-normalise n elements and divide by `factor`: `out[to:] = x[at:] / (factor * sqrt(sum(x[at:]**2) + TINY))`."""
    divisor = splat(np.float32(factor * np.sqrt(np.float64(dot(x, at, x, at, n)) + TINY)))
    for i in range(0, n, LANES):
        store(out, to + i, div(load(x, at + i), divisor))


@jit
def _wide(
    m: Any, at: int, new_at: int, apart: int, n: int, qk: Any, q: int, v: Any, v_at: int, decay: Any, strength: Any,
    out: Any, to: int,
) -> None:  # fmt: skip
    """Apply one token to 64 columns (four vectors) of a head's matrix; write the token's output for these columns.

    In the states m, the old matrix is read from index `at` on, and the new matrix is written from index `new_at` on.
    These are the indices of row 0 at the first of the columns. The n = E rows are `apart` elements apart. In `qk`
    (`_prepare`), the token's query is at index q, and its key at q + n. The token's value for the first column is at
    index `v_at` of v, and its output at index `to` of `out`. The vectors `decay` and `strength` have one factor in
    every lane: of the matrix, and of the correction, which is `sigmoid(beta)`.
    """
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for e in range(n):
        key, row = load_splat(qk, q + n + e), at + e * apart
        a = fma(key, load(m, row), a)
        b = fma(key, load(m, row + LANES), b)
        c = fma(key, load(m, row + 2 * LANES), c)
        d = fma(key, load(m, row + 3 * LANES), d)
    a = mul(strength, sub(load(v, v_at), mul(decay, a)))
    b = mul(strength, sub(load(v, v_at + LANES), mul(decay, b)))
    c = mul(strength, sub(load(v, v_at + 2 * LANES), mul(decay, c)))
    d = mul(strength, sub(load(v, v_at + 3 * LANES), mul(decay, d)))
    w, x, y, z = zeros(), zeros(), zeros(), zeros()
    for e in range(n):
        query, key, row = load_splat(qk, q + e), load_splat(qk, q + n + e), at + e * apart
        new_row = new_at + e * apart
        new = fma(key, a, mul(decay, load(m, row)))
        store(m, new_row, new)
        w = fma(query, new, w)
        new = fma(key, b, mul(decay, load(m, row + LANES)))
        store(m, new_row + LANES, new)
        x = fma(query, new, x)
        new = fma(key, c, mul(decay, load(m, row + 2 * LANES)))
        store(m, new_row + 2 * LANES, new)
        y = fma(query, new, y)
        new = fma(key, d, mul(decay, load(m, row + 3 * LANES)))
        store(m, new_row + 3 * LANES, new)
        z = fma(query, new, z)
    store(out, to, w)
    store(out, to + LANES, x)
    store(out, to + 2 * LANES, y)
    store(out, to + 3 * LANES, z)


@jit
def _one(
    m: Any, at: int, new_at: int, apart: int, n: int, qk: Any, q: int, v: Any, v_at: int, decay: Any, strength: Any,
    out: Any, to: int,
) -> None:  # fmt: skip
    """Apply one token to 16 columns, with the arguments of `_wide`."""
    known, y = zeros(), zeros()
    for e in range(n):
        known = fma(load_splat(qk, q + n + e), load(m, at + e * apart), known)
    change = mul(strength, sub(load(v, v_at), mul(decay, known)))
    for e in range(n):
        new = fma(load_splat(qk, q + n + e), change, mul(decay, load(m, at + e * apart)))
        store(m, new_at + e * apart, new)
        y = fma(load_splat(qk, q + e), new, y)
    store(out, to, y)


@jit
def _prepare(job: Any, block: Any, head: int, t: int, qk: Any, at: int) -> None:
    """Write to qk[at:] the scaled query, the scaled key, the decay and `sigmoid(beta)` of token t in a value head."""
    n, n_keys = block[DELTA_KEY_DIM], block[DELTA_KEYS]
    row = 2 * n_keys * n + block[DELTA_VALUES] * block[DELTA_VALUE_DIM]
    x, of_head = floats(job[X]), head // block[DELTA_SHARED] % n_keys * n
    _scaled(x, t * row + of_head, n, np.sqrt(np.float64(n)), qk, at)
    _scaled(x, t * row + n_keys * n + of_head, n, 1.0, qk, at + n)
    step = get(floats(job[STEP]), t * job[STEP_ROW] + head) + get(floats(block[DELTA_BIAS]), head)
    rate = np.float64(get(floats(block[DELTA_RATE]), head))
    put(qk, at + 2 * n, exp_one(rate * softplus(step)))
    beta = get(floats(job[BETA]), t * job[BETA_ROW] + head)
    put(qk, at + 2 * n + 1, np.float32(1.0) / (np.float32(1.0) + exp_one(-beta)))


@jit
def _run_head(job: Any, block: Any, head: int, first: int, n: int, source: int, target: int, qk: Any) -> None:
    """Compute n tokens, from row `first` on, of a value head; read the state in slot `source`, write slot `target`."""
    E, P, H = block[DELTA_KEY_DIM], block[DELTA_VALUE_DIM], block[DELTA_VALUES]
    m, x, out, gate = floats(job[STORE]), floats(job[X]), floats(job[OUT]), floats(job[GATE])
    values = 2 * block[DELTA_KEYS] * E
    row, size, step = values + H * P, H * E * P, 2 * E + LANES
    begin, to = source * size + head * E * P, target * size + head * E * P
    weight, eps = floats(block[DELTA_NORM]), number(block[DELTA_EPS])
    for piece in range(first, first + n, PIECE):
        last = min(piece + PIECE, first + n)
        for t in range(piece, last):
            _prepare(job, block, head, t, qk, (t - piece) * step)
        column = 0
        while column < P:
            wide = column + 4 * LANES <= P
            for t in range(piece, last):
                at, v, y = (t - piece) * step, t * row + values + head * P + column, t * H * P + head * P + column
                decay, strength = load_splat(qk, at + 2 * E), load_splat(qk, at + 2 * E + 1)
                # The first token reads the source slot, which stays as it is: other sequences may still need it.
                old = begin if t == first else to
                if wide:
                    _wide(m, old + column, to + column, P, E, qk, at, x, v, decay, strength, out, y)
                else:
                    _one(m, old + column, to + column, P, E, qk, at, x, v, decay, strength, out, y)
            column += 4 * LANES if wide else LANES
        for t in range(piece, last):
            y = t * H * P + head * P
            rms_norm(out, y, P, weight, np.float32(eps), out, y)
            for i in range(0, P, LANES):
                store(out, y + i, mul(load(out, y + i), silu(load(gate, t * job[GATE_ROW] + head * P + i))))


@task
def delta_head(job: Any, chunk: int, scratch: int) -> None:
    """Compute value head `chunk` of all runs. A run is consecutive rows of one sequence (`layout.py`)."""
    runs, qk = words(job[RUNS]), floats(scratch)
    for i in range(job[N_RUNS]):
        a = runs[i * RUN_WIDTH :]
        _run_head(job, words(job[BLOCK]), chunk, a[RUN_FIRST], a[RUN_ROWS], a[RUN_SOURCE], a[RUN_TARGET], qk)


@entry
def delta_net(
    address: int, block: int, x: int, gate: int, gate_row: int, beta: int, beta_row: int, step: int, step_row: int,
    states: int, runs: int, n_runs: int, out: int,
) -> None:  # fmt: skip
    """Compute the gated delta rule with H value heads, norm each head's output, and multiply with the SiLU of the gate.

    `address` is that of the thread pool's control block, `block` that of the rule's words (`layout.py`). E and P are
    multiples of 16. An argument `..._row` is the distance in elements from row to row. The others are addresses:

    - x: contiguous rows, each with the queries, keys and values of a token
    - gate: the gate, (T, H * P). beta: (T, H). step: the time step (dt) before its bias and softplus, (T, H)
    - states: the states, (slots, H, E, P). runs: the runs, int64 (n_runs, RUN_WIDTH)
    - out: the contiguous output, (T, H * P)
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    job[X], job[GATE], job[GATE_ROW], job[BETA], job[BETA_ROW] = x, gate, gate_row, beta, beta_row
    job[STEP], job[STEP_ROW], job[BLOCK], job[STORE] = step, step_row, block, states
    job[RUNS], job[N_RUNS], job[OUT] = runs, n_runs, out
    run(control, b[DELTA_TASK], b[DELTA_VALUES])
