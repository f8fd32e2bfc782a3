"""Programs: run the steps of a model's layers in one call, without Python code between them.

Each step of a program is one backend operation. Returning to Python between steps would take an eighth of the decode
time, because reading the weights evicts the interpreter from the CPU caches. `mlx_engine/backends/cpu/lowering.py`
makes the steps. The same model, run op by op, is the reference, and must give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .build.jit import entry, jit
from .build.layout import (
    A_AT,
    A_ROW,
    ATTENTION,
    B_AT,
    B_ROW,
    C_AT,
    C_ROW,
    CONVOLVE,
    COPY,
    COS,
    D_AT,
    D_ROW,
    DELTA,
    ENTRY_ATTEND,
    ENTRY_CONVOLVE,
    ENTRY_DELTA,
    ENTRY_EXPERTS,
    ENTRY_GATE,
    ENTRY_HEADS,
    ENTRY_NORM_ADD,
    ENTRY_PROJECT,
    ENTRY_PUT,
    ENTRY_SPACE,
    EXPERTS,
    FROM_ALL,
    GATE,
    GROUP_SEQUENCES,
    GROUP_SLOTS,
    HEAD_LINEAR,
    HEADS,
    JOIN,
    KV_APPEND,
    KV_ARRAYS,
    KV_GROUP,
    KV_SLOTS,
    KV_STORE,
    KV_TYPE,
    KV_WIDTH,
    KV_WINDOW,
    LANES,
    LAYER,
    MULTIPLY,
    N_HEADS,
    N_KV_HEADS,
    NORM_ADD,
    OP,
    OUT,
    OUT_2,
    PASS_N_RUNS,
    PASS_PAGE,
    PASS_POSITIONS,
    PASS_ROWS,
    PASS_RUNS,
    PASS_SEQUENCES,
    PASS_TOKENS,
    PASS_WANTED,
    PROJECT,
    ROW_WIDTH,
    SCALE,
    SEQ_NEW,
    SEQ_WANTED,
    SIN,
    SPACE,
    STATE_STORE,
    STATE_STORE_2,
    STEP_BLOCK,
    STEP_SCALE,
    STEP_SINKS,
    STEP_SOFTCAP,
    STEP_WIDTH,
    STEPS,
    TASK_ATTEND_DECODE,
    TASK_ATTEND_PREFILL,
    TASK_GATE,
    TASK_PUT_SPAN,
    WANTED,
)
from .build.memory import floats, invoke, number, words
from .build.vectors import get, put
from .products.linear_job import ceil_div


@jit
def _at(values: int, n_tokens: int, step: Any, word: int) -> Any:
    """Return the address of an input of a step; 0 if the input is absent.

    `word` is A_AT, B_AT, C_AT or D_AT. `n_tokens * step[word]` is the offset in `values`, in floats, of the array that
    contains the input, and `step[word + 1]` is the first column of the input in this array.
    """
    return 0 if step[word] < 0 else values + 4 * (n_tokens * step[word] + step[word + 1])


@jit
def _out(values: int, n_tokens: int, step: Any, word: int) -> Any:
    """Return the address of an output of a step. Its offset in `values` is `n_tokens * step[word]` floats."""
    return values + 4 * n_tokens * step[word]


@jit
def _copy(source: int, row: int, numbers: Any, n_rows: int, width: int, out: int, chosen: bool) -> None:
    """Copy n_rows rows to contiguous rows: the rows `numbers[:n_rows]` if `chosen` is true, else the first rows.

    The rows of the source are `row` elements apart.
    """
    x, y = floats(source), floats(out)
    for t in range(n_rows):
        r = numbers[t] if chosen else t
        for i in range(width):
            put(y, t * width + i, get(x, r * row + i))


@jit
def _multiply(a: int, a_row: int, b: int, b_row: int, n_rows: int, width: int, out: int) -> None:
    """Write `a * b` to contiguous rows; the rows of a are `a_row` elements apart, the rows of b `b_row` elements."""
    x, y, z = floats(a), floats(b), floats(out)
    for t in range(n_rows):
        for i in range(width):
            put(z, t * width + i, get(x, a_row * t + i) * get(y, b_row * t + i))


@jit
def _scale(source: int, row: int, factor: float, n_rows: int, width: int, out: int) -> None:
    """Multiply rows that are `row` elements apart by `factor`; write contiguous rows."""
    x, y, times = floats(source), floats(out), np.float32(factor)
    for t in range(n_rows):
        for i in range(width):
            put(y, t * width + i, get(x, row * t + i) * times)


@jit
def _move(source: int, row: int, n_rows: int, width: int, out: int, out_row: int) -> None:
    """Copy rows that are `row` elements apart to rows that are `out_row` elements apart."""
    x, y = floats(source), floats(out)
    for t in range(n_rows):
        for i in range(width):
            put(y, t * out_row + i, get(x, t * row + i))


@jit
def _head_linear(address: int, project: int, step: Any, n_rows: int, x: int, work: int, out: int) -> None:
    """Multiply the first k elements of each head by this head's matrix (n, k) (HEAD_LINEAR in `layout.py`).

    Heads are processed one at a time, each for all rows. `work` has space for the inputs and products of one head, and
    for the scratch memory of `project`.
    """
    n_heads, k, n = step[N_HEADS], step[N_KV_HEADS], step[ROW_WIDTH]
    width, blocks = step[A_ROW] // n_heads, words(step[STEP_BLOCK])
    results = work + 4 * n_rows * ceil_div(k, LANES) * LANES
    rest = results + 4 * n_rows * ceil_div(n, LANES) * LANES
    for h in range(n_heads):
        _move(x + 4 * h * width, step[A_ROW], n_rows, k, work, k)
        invoke(project, (address, blocks[h], n_rows, work, 0, rest, results))
        _move(results, n, n_rows, n, out + 4 * h * n, n_heads * n)


@jit
def _join(step: Any, n_rows: int, a: int, b: int, out: int) -> None:
    """For each head, write n elements of `a` and then m elements of `b` (JOIN in `layout.py`)."""
    n_heads, n, m = step[N_HEADS], step[ROW_WIDTH], step[N_KV_HEADS]
    for h in range(n_heads):
        to = out + 4 * h * (n + m)
        _move(a + 4 * h * n, step[A_ROW], n_rows, n, to, n_heads * (n + m))
        _move(b + 4 * h * m, step[B_ROW], n_rows, m, to + 4 * n, n_heads * (n + m))


@jit
def _append(address: int, entries: Any, step: Any, kv: Any, n_tokens: int, k: int, v: int) -> None:
    """Write the keys and values of the new tokens to their slots; if the keys are also the values, only the keys."""
    values = 0 if kv[KV_ARRAYS] == 1 else v
    arguments = (
        address, entries[TASK_PUT_SPAN], n_tokens, step[N_KV_HEADS], step[ROW_WIDTH], k, step[A_ROW], values,
        step[B_ROW], kv[KV_STORE], kv[KV_TYPE], kv[KV_SLOTS], words(kv[KV_GROUP])[GROUP_SLOTS],
    )  # fmt: skip
    invoke(entries[ENTRY_PUT], arguments)


@jit
def _run_step(address: int, program: int, step: Any, of: Any, layers: int, values: int, work: int, parts: int) -> None:
    """Run one step. `of` has the parameters of the forward pass (PASS_TOKENS, ... in `layout.py`)."""
    entries, n_tokens = words(program), of[PASS_TOKENS]
    n_rows = of[PASS_ROWS] if step[WANTED] != 0 else n_tokens
    a, b = _at(values, n_tokens, step, A_AT), _at(values, n_tokens, step, B_AT)
    out = _out(values, n_tokens, step, OUT)
    kv = words(layers + 8 * KV_WIDTH * step[LAYER])
    if step[OP] == PROJECT:
        invoke(entries[ENTRY_PROJECT], (address, step[STEP_BLOCK], n_rows, a, b, work, out))
    elif step[OP] == EXPERTS:
        invoke(entries[ENTRY_EXPERTS], (address, step[STEP_BLOCK], n_rows, a, b, work, out))
    elif step[OP] == HEADS:
        heads = (
            address, step[STEP_BLOCK], n_rows, of[PASS_POSITIONS], a, step[A_ROW], b, step[B_ROW], step[COS],
            step[SIN], out, _out(values, n_tokens, step, OUT_2),
        )  # fmt: skip
        invoke(entries[ENTRY_HEADS], heads)
    elif step[OP] == KV_APPEND:
        _append(address, entries, step, kv, n_rows, a, b)
    elif step[OP] == ATTENTION:
        arguments = (
            address, entries[TASK_ATTEND_DECODE], entries[TASK_ATTEND_PREFILL], a, n_rows, step[N_HEADS],
            step[N_KV_HEADS], step[ROW_WIDTH], kv[KV_STORE], kv[KV_TYPE], kv[KV_SLOTS], kv[KV_ARRAYS], of[PASS_PAGE],
            kv[KV_WINDOW], words(kv[KV_GROUP])[GROUP_SEQUENCES], of[PASS_SEQUENCES],
            SEQ_WANTED if step[WANTED] != 0 else SEQ_NEW, number(step[STEP_SCALE]),
            number(step[STEP_SOFTCAP]), step[STEP_SINKS], parts, out,
        )  # fmt: skip
        invoke(entries[ENTRY_ATTEND], arguments)
    elif step[OP] == COPY:
        _copy(a, step[A_ROW], words(of[PASS_WANTED]), n_rows, step[ROW_WIDTH], out, step[FROM_ALL] != 0)
    elif step[OP] == GATE:
        kind = step[STEP_BLOCK]
        gate = (address, entries[TASK_GATE], kind, n_rows, step[ROW_WIDTH], a, step[A_ROW], b, step[B_ROW], out)
        invoke(entries[ENTRY_GATE], gate)
    elif step[OP] == CONVOLVE:
        c = _at(values, n_tokens, step, C_AT)
        convolution = (
            address, step[STEP_BLOCK], n_rows, a, step[A_ROW], b, step[B_ROW], c, step[C_ROW],
            kv[STATE_STORE], of[PASS_RUNS], of[PASS_N_RUNS], out,
        )  # fmt: skip
        invoke(entries[ENTRY_CONVOLVE], convolution)
    elif step[OP] == DELTA:
        rule = (
            address, step[STEP_BLOCK], a, b, step[B_ROW], _at(values, n_tokens, step, C_AT), step[C_ROW],
            _at(values, n_tokens, step, D_AT), step[D_ROW], kv[STATE_STORE_2], of[PASS_RUNS], of[PASS_N_RUNS], out,
        )  # fmt: skip
        invoke(entries[ENTRY_DELTA], rule)
    elif step[OP] == SPACE:
        space = (
            address, step[STEP_BLOCK], n_rows, a, b, step[B_ROW], _at(values, n_tokens, step, C_AT), step[C_ROW],
            kv[STATE_STORE_2], of[PASS_RUNS], of[PASS_N_RUNS], out,
        )  # fmt: skip
        invoke(entries[ENTRY_SPACE], space)
    elif step[OP] == HEAD_LINEAR:
        _head_linear(address, entries[ENTRY_PROJECT], step, n_rows, a, work, out)
    elif step[OP] == JOIN:
        _join(step, n_rows, a, b, out)
    elif step[OP] == MULTIPLY:
        _multiply(a, step[A_ROW], b, step[B_ROW], n_rows, step[ROW_WIDTH], out)
    elif step[OP] == SCALE:
        _scale(a, step[A_ROW], number(step[STEP_SCALE]), n_rows, step[ROW_WIDTH], out)
    elif step[OP] == NORM_ADD:
        invoke(entries[ENTRY_NORM_ADD], (address, step[STEP_BLOCK], n_rows, step[ROW_WIDTH], a, b, out))


@entry
def run_steps(
    address: int,
    program: int,
    first: int,
    end: int,
    forward_pass: int,
    layers: int,
    values: int,
    work: int,
    parts: int,
) -> None:
    """Run the steps [first, end) of a program.

    The other arguments are addresses:

    - address: of the thread pool's control block
    - program, forward_pass: of the descriptors of the program and of the pass (`layout.py`)
    - layers: of the descriptors of the layers' keys, values and states (KV_STORE, ... in `layout.py`)
    - values: of the memory of all inputs and outputs of steps; a multiple of 64
    - work: of scratch memory for `project`, `run_experts` and `_head_linear`
    - parts: of memory for the results of attention over blocks of keys (`attend`)
    """
    of = words(forward_pass)
    for i in range(first, end):
        step = words(program + 8 * (STEPS + i * STEP_WIDTH))
        _run_step(address, program, step, of, layers, values, work, parts)
