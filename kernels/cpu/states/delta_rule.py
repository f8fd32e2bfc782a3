"""The gated delta rule (the mixer of Qwen3-Next and Qwen3.5) with its output norm and gate.

A chunk, the unit of work of a thread, is one value head for all tokens of the pass. The state of a head is a
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
    LINE_BYTES,
    RUN_FIRST,
    RUN_ROWS,
    RUN_SOURCE,
    RUN_TARGET,
    RUN_WIDTH,
)
from ..build.memory import floats, number, words
from ..build.vectors import (
    div,
    fence,
    fma,
    get,
    largest_lane,
    load,
    load_splat,
    mul,
    put,
    splat,
    store,
    stream,
    sub,
    zeros,
)
from ..formats.float32 import dot
from ..products.activations import silu
from ..products.norms import rms_norm

# Indices of the int64 words of a job, which are arguments of `delta_net`.
X, GATE, GATE_ROW, BETA, BETA_ROW, STEP, STEP_ROW, BLOCK, STORE, RUNS, N_RUNS, OUT = range(12)
# Number of tokens whose queries and keys are prepared at a time.
PIECE = 32
# Added to the squared lengths of queries and keys before the square root.
TINY = 1e-6
# The largest number of columns to which tokens are applied at a time.
_COLUMNS = 4 * LANES
# How a new state is written to a slot: not at all, with ordinary stores, or with streaming stores, which do not read
# the cache lines first. Streaming stores are usual, because the slot is read only in the next pass, when it would have
# left the cache anyway.
_NOTHING, _STORE, _STREAM = 0, 1, 2


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
    old: Any, at: int, apart: int, n: int, qk: Any, q: int, v: Any, v_at: int, decay: Any, strength: Any, kept: Any,
    keeps: bool, m: Any, to: int, row: int, writes: int, out: Any, y: int,
) -> None:  # fmt: skip
    """Apply one token to 64 columns (four vectors) of a head's matrix; write the token's output for these columns.

    The n = E rows of the old matrix are `apart` elements apart, from index `at` of `old` on. If `keeps`, the new matrix
    is written to `kept`, with rows of _COLUMNS elements. If `writes` is not _NOTHING, the new matrix is also written to
    the states m, from index `to` on, with rows `row` elements apart. In `qk`, which `_prepare` fills, the token's query
    is at index q, and its key at q + n. The token's value for the first column is at index `v_at` of v, and its output
    at index y of `out`. Every lane of `decay` is the factor of the old matrix, and every lane of `strength` is the
    factor of the correction, `sigmoid(beta)`.
    """
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for e in range(n):
        key, i = load_splat(qk, q + n + e), at + e * apart
        a = fma(key, load(old, i), a)
        b = fma(key, load(old, i + LANES), b)
        c = fma(key, load(old, i + 2 * LANES), c)
        d = fma(key, load(old, i + 3 * LANES), d)
    a = mul(strength, sub(load(v, v_at), mul(decay, a)))
    b = mul(strength, sub(load(v, v_at + LANES), mul(decay, b)))
    c = mul(strength, sub(load(v, v_at + 2 * LANES), mul(decay, c)))
    d = mul(strength, sub(load(v, v_at + 3 * LANES), mul(decay, d)))
    w, x, z, u = zeros(), zeros(), zeros(), zeros()
    for e in range(n):
        query, key, i = load_splat(qk, q + e), load_splat(qk, q + n + e), at + e * apart
        new_a = fma(key, a, mul(decay, load(old, i)))
        new_b = fma(key, b, mul(decay, load(old, i + LANES)))
        new_c = fma(key, c, mul(decay, load(old, i + 2 * LANES)))
        new_d = fma(key, d, mul(decay, load(old, i + 3 * LANES)))
        w, x, z, u = fma(query, new_a, w), fma(query, new_b, x), fma(query, new_c, z), fma(query, new_d, u)
        if keeps:
            store(kept, e * _COLUMNS, new_a)
            store(kept, e * _COLUMNS + LANES, new_b)
            store(kept, e * _COLUMNS + 2 * LANES, new_c)
            store(kept, e * _COLUMNS + 3 * LANES, new_d)
        _write(m, to + e * row, new_a, writes)
        _write(m, to + e * row + LANES, new_b, writes)
        _write(m, to + e * row + 2 * LANES, new_c, writes)
        _write(m, to + e * row + 3 * LANES, new_d, writes)
    store(out, y, w)
    store(out, y + LANES, x)
    store(out, y + 2 * LANES, z)
    store(out, y + 3 * LANES, u)


@jit
def _one(
    old: Any, at: int, apart: int, n: int, qk: Any, q: int, v: Any, v_at: int, decay: Any, strength: Any, kept: Any,
    keeps: bool, m: Any, to: int, row: int, writes: int, out: Any, y: int,
) -> None:  # fmt: skip
    """Apply one token to 16 columns, with the arguments of `_wide`."""
    known, sums = zeros(), zeros()
    for e in range(n):
        known = fma(load_splat(qk, q + n + e), load(old, at + e * apart), known)
    change = mul(strength, sub(load(v, v_at), mul(decay, known)))
    for e in range(n):
        new = fma(load_splat(qk, q + n + e), change, mul(decay, load(old, at + e * apart)))
        sums = fma(load_splat(qk, q + e), new, sums)
        if keeps:
            store(kept, e * _COLUMNS, new)
        _write(m, to + e * row, new, writes)
    store(out, y, sums)


@jit
def _write(m: Any, at: int, x: Any, writes: int) -> None:
    """Write 16 elements of a state."""
    if writes == _STREAM:
        stream(m, at, x)
    elif writes == _STORE:
        store(m, at, x)


@jit
def _prepare(job: Any, block: Any, head: int, t: int, qk: Any, at: int) -> None:
    """Write to qk[at:] the scaled query, the scaled key, the decay and `sigmoid(beta)` of token t for a value head."""
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
def _run_head(job: Any, block: Any, head: int, runs: Any, begin: int, stop: int, qk: Any, kept: Any) -> None:
    """Compute a value head for runs `begin` to `stop - 1`, which are a chain (`_end_of_chain`).

    Several runs have at most PIECE tokens in total. While tokens are applied to some columns, the state of these
    columns stays in `kept`. It is written to a run's target slot only after the last token of the run, and after every
    PIECE tokens of a longer run.
    """
    E, P, H = block[DELTA_KEY_DIM], block[DELTA_VALUE_DIM], block[DELTA_VALUES]
    m, x, out, gate = floats(job[STORE]), floats(job[X]), floats(job[OUT]), floats(job[GATE])
    values = 2 * block[DELTA_KEYS] * E
    row, size, step = values + H * P, H * E * P, 2 * E + LANES
    writes = _STREAM if job[STORE] % LINE_BYTES == 0 else _STORE
    weight, eps = floats(block[DELTA_NORM]), number(block[DELTA_EPS])
    a, b = runs[begin * RUN_WIDTH :], runs[(stop - 1) * RUN_WIDTH :]
    first, end = a[RUN_FIRST], b[RUN_FIRST] + b[RUN_ROWS]
    for piece in range(first, end, PIECE):
        last = min(piece + PIECE, end)
        for t in range(piece, last):
            _prepare(job, block, head, t, qk, (t - piece) * step)
        column = 0
        while column < P:
            wide = column + 4 * LANES <= P
            # The first token reads the source slot, which is not changed, because other sequences may still need it.
            slot = a[RUN_SOURCE] if piece == first else a[RUN_TARGET]
            old, old_at, apart, i = m, slot * size + head * E * P + column, P, begin
            for t in range(piece, last):
                now = runs[i * RUN_WIDTH :]
                at, v, y = (t - piece) * step, t * row + values + head * P + column, t * H * P + head * P + column
                decay, strength = load_splat(qk, at + 2 * E), load_splat(qk, at + 2 * E + 1)
                to, ends = now[RUN_TARGET] * size + head * E * P + column, t + 1 == now[RUN_FIRST] + now[RUN_ROWS]
                how = writes if ends else _NOTHING
                if t + 1 == last and last < end:
                    how = _STORE  # the next piece reads this state from the cache
                if wide:
                    _wide(
                        old, old_at, apart, E, qk, at, x, v, decay, strength, kept, t + 1 < last, m, to, P, how, out, y
                    )  # fmt: skip
                else:
                    _one(
                        old, old_at, apart, E, qk, at, x, v, decay, strength, kept, t + 1 < last, m, to, P, how, out, y
                    )  # fmt: skip
                old, old_at, apart = kept, 0, _COLUMNS
                i += ends
            column += 4 * LANES if wide else LANES
        for t in range(piece, last):
            y = t * H * P + head * P
            rms_norm(out, y, P, weight, np.float32(eps), out, y)
            for i in range(0, P, LANES):
                store(out, y + i, mul(load(out, y + i), silu(load(gate, t * job[GATE_ROW] + head * P + i))))
    fence()


@jit
def _end_of_chain(runs: Any, n_runs: int, i: int) -> int:
    """Return the index after the last run of the chain that begins with run i.

    Each later run of a chain begins where the previous run ends: with the next row, and with the state in the previous
    run's target slot. The runs have at most PIECE tokens in total, but a chain of one run may have more.
    """
    n, j = runs[i * RUN_WIDTH + RUN_ROWS], i + 1
    while j < n_runs:
        a, b = runs[(j - 1) * RUN_WIDTH :], runs[j * RUN_WIDTH :]
        n += b[RUN_ROWS]
        if b[RUN_SOURCE] != a[RUN_TARGET] or b[RUN_FIRST] != a[RUN_FIRST] + a[RUN_ROWS] or n > PIECE:
            break
        j += 1
    return j


@task
def delta_head(job: Any, chunk: int, scratch: int) -> None:
    """Compute value head `chunk` of all runs. A run is consecutive rows of one sequence (`layout.py`)."""
    runs, i = words(job[RUNS]), 0
    E = words(job[BLOCK])[DELTA_KEY_DIM]
    qk, kept = floats(scratch), floats(scratch + 4 * PIECE * (2 * E + LANES))
    while i < job[N_RUNS]:
        stop = _end_of_chain(runs, job[N_RUNS], i)
        _run_head(job, words(job[BLOCK]), chunk, runs, i, stop, qk, kept)
        i = stop


@entry
def delta_net(
    address: int, block: int, x: int, gate: int, gate_row: int, beta: int, beta_row: int, step: int, step_row: int,
    states: int, runs: int, n_runs: int, out: int,
) -> None:  # fmt: skip
    """Compute the gated delta rule with H value heads, norm each head's output, and multiply with the SiLU of the gate.

    E and P are multiples of 16. An argument `..._row` is the distance in elements from row to row. `n_runs` is the
    number of runs. The remaining arguments are addresses:

    - address: the thread pool's control block. block: the words of the delta rule (`layout.py`)
    - x: contiguous rows, each with the queries, keys and values of a token
    - gate: the gate before SiLU, (T, H * P). beta: beta before its sigmoid, (T, H)
    - step: the time step (dt) before its bias and softplus, (T, H)
    - states: the states, (slots, H, E, P). runs: the runs, int64 (n_runs, RUN_WIDTH)
    - out: the contiguous output, (T, H * P)
    """
    control, b = words(address), words(block)
    job = control[JOB:]
    job[X], job[GATE], job[GATE_ROW], job[BETA], job[BETA_ROW] = x, gate, gate_row, beta, beta_row
    job[STEP], job[STEP_ROW], job[BLOCK], job[STORE] = step, step_row, block, states
    job[RUNS], job[N_RUNS], job[OUT] = runs, n_runs, out
    run(control, b[DELTA_TASK], b[DELTA_VALUES])
