"""Causal convolutions over the tokens of sequences (short convolutions), and products with an activated gate.

Each channel of an output row is the weighted sum of this channel's last `taps` inputs, added from the oldest to the
newest, so the bits do not depend on the number of tokens in a pass. A *run* is consecutive rows of one sequence. A
state slot has the last `taps - 1` inputs of a sequence. A run reads the inputs before its first row from its source
slot. It writes the `taps - 1` inputs that end with its last row to its target slot.
"""

from __future__ import annotations

from typing import Any

from ..build.exponentials import exp
from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    CONV_BIAS,
    CONV_CHANNELS,
    CONV_SILU,
    CONV_TAPS,
    CONV_TASK,
    CONV_WEIGHT,
    JOB,
    LANES,
    RUN_FIRST,
    RUN_ROWS,
    RUN_SOURCE,
    RUN_TARGET,
    RUN_WIDTH,
    SMALL_BATCH,
)
from ..build.memory import floats, words
from ..build.vectors import add, div, fma, load, mul, splat, store, sub, zeros
from ..products.activations import activate, gated, silu

# Words of a job, most of them arguments of `short_conv`. SPAN is the number of channels in a chunk, a thread's unit of
# work. In a job of `gate_span`, BEFORE is the address of the gate, and KIND its activation function (0: sigmoid).
X, X_ROW, BEFORE, BEFORE_ROW, AFTER, AFTER_ROW, BLOCK, STORE, RUNS, N_RUNS, OUT, SPAN, ROWS, WIDTH, KIND = range(15)
# CHANNELS: channels per chunk of a convolution with more than SMALL_BATCH tokens. TOKENS: tokens per chunk of a gate.
CHANNELS, TOKENS = 128, 32


@jit
def _input(job: Any, x: Any, before: Any, row: int, c: int) -> Any:
    """Return 16 channels, from c on, of a row of the input, multiplied with the input gate if the job has one."""
    value = load(x, row * job[X_ROW] + c)
    return mul(value, load(before, row * job[BEFORE_ROW] + c)) if job[BEFORE] != 0 else value


@jit
def _channels(job: Any, block: Any, a: Any, c: int) -> None:
    """Compute 16 channels, from c on, of a run; `a` has the run's words. Write the last inputs to the target slot."""
    taps, n_channels = block[CONV_TAPS], block[CONV_CHANNELS]
    x, before, after = floats(job[X]), floats(job[BEFORE]), floats(job[AFTER])
    weight, out, states = floats(block[CONV_WEIGHT]), floats(job[OUT]), floats(job[STORE])
    size = (taps - 1) * n_channels
    bias = load(floats(block[CONV_BIAS]), c) if block[CONV_BIAS] != 0 else zeros()
    source, target, first, n = a[RUN_SOURCE] * size, a[RUN_TARGET] * size, a[RUN_FIRST], a[RUN_ROWS]
    for t in range(n):
        sum_ = zeros()
        for w in range(taps):
            s = t + w - taps + 1
            if s < 0:
                value = load(states, source + (s + taps - 1) * n_channels + c)
            else:
                value = _input(job, x, before, first + s, c)
            sum_ = fma(load(weight, w * n_channels + c), value, sum_)
        if block[CONV_BIAS] != 0:
            sum_ = add(sum_, bias)
        if block[CONV_SILU] != 0:
            sum_ = silu(sum_)
        if job[AFTER] != 0:
            sum_ = mul(sum_, load(after, (first + t) * job[AFTER_ROW] + c))
        store(out, (first + t) * n_channels + c, sum_)
    for w in range(taps - 1):
        s = n + w - taps + 1
        if s < 0:
            value = load(states, source + (s + taps - 1) * n_channels + c)
        else:
            value = _input(job, x, before, first + s, c)
        store(states, target + w * n_channels + c, value)


@task
def convolve_span(job: Any, chunk: int, scratch: int) -> None:
    """Convolve a span of channels of all runs."""
    block, runs = words(job[BLOCK]), words(job[RUNS])
    for c in range(chunk * job[SPAN], min((chunk + 1) * job[SPAN], block[CONV_CHANNELS]), LANES):
        for i in range(job[N_RUNS]):
            _channels(job, block, runs[i * RUN_WIDTH :], c)


@entry
def short_conv(
    address: int, block: int, n_rows: int, x: int, x_row: int, before: int, before_row: int, after: int, after_row: int,
    states: int, runs: int, n_runs: int, out: int,
) -> None:  # fmt: skip
    """Write `out = after * f(convolution(before * x) + bias)` for `n_rows` = T rows.

    f is SiLU if CONV_SILU is set, else the identity. C, the number of channels, is a multiple of 16. An argument
    `..._row` is the distance in elements from row to row.

    - address: address of the thread pool's control block. block: address of the convolution's words (`layout.py`)
    - x: address of the input. before, after: addresses of the gates of the input and of the output, or 0
    - states: address of the states, (slots, taps - 1, C). runs: address of the runs, int64 (n_runs, RUN_WIDTH)
    - out: address of the contiguous output, (T, C)
    """
    control, b = words(address), words(block)
    job, n_channels = control[JOB:], b[CONV_CHANNELS]
    job[X], job[X_ROW], job[BEFORE], job[BEFORE_ROW] = x, x_row, before, before_row
    job[AFTER], job[AFTER_ROW], job[BLOCK], job[STORE] = after, after_row, block, states
    job[RUNS], job[N_RUNS], job[OUT] = runs, n_runs, out
    job[SPAN] = n_channels if n_rows <= SMALL_BATCH else CHANNELS
    run(control, b[CONV_TASK], (n_channels + job[SPAN] - 1) // job[SPAN])


@task
def gate_span(job: Any, chunk: int, scratch: int) -> None:
    """Write the product of x and the activated gate for TOKENS rows; without x, write the activated gate."""
    x, gate, out = floats(job[X]), floats(job[BEFORE]), floats(job[OUT])
    for t in range(chunk * TOKENS, min((chunk + 1) * TOKENS, job[ROWS])):
        for i in range(0, job[WIDTH], LANES):
            at, b = t * job[WIDTH] + i, load(gate, t * job[BEFORE_ROW] + i)
            if job[X] == 0:
                store(out, at, activate(job[KIND], b))
            elif job[KIND] == 0:
                store(out, at, div(load(x, t * job[X_ROW] + i), add(splat(1.0), exp(sub(zeros(), b)))))
            else:
                store(out, at, gated(job[KIND], b, load(x, t * job[X_ROW] + i)))


@entry
def gate_rows(
    address: int, task: int, kind: int, n_rows: int, width: int, x: int, x_row: int, gate: int, gate_row: int, out: int
) -> None:
    """Write `x * f(gate)`, or `f(gate)` if x is 0, to contiguous rows (n_rows, width) at address `out`.

    `address` is the address of the thread pool's control block, `task` the address of `gate_span`. x and `gate` are
    addresses of rows that are `x_row` and `gate_row` elements apart. `kind` is the number of an activation function
    (`layout.py`), or 0 for the sigmoid, which is implemented only with x. `width` is a multiple of 16.
    """
    control = words(address)
    job = control[JOB:]
    job[X], job[X_ROW], job[BEFORE], job[BEFORE_ROW] = x, x_row, gate, gate_row
    job[OUT], job[ROWS], job[WIDTH], job[KIND] = out, n_rows, width, kind
    run(control, task, (n_rows + TOKENS - 1) // TOKENS)
