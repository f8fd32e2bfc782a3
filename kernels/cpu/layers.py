"""Whole layers, one after the other, for few tokens: nothing else runs between the jobs.

Between two calls from Python the processor's caches hold weights, and the interpreter comes from memory: for one token
that takes an eighth of the time. There is no NumPy twin: `models/` says word by word what a layer is.
"""

from __future__ import annotations

from kernels.cpu.heads import norm_rope_to, put_heads
from kernels.cpu.jit import entry, jit
from kernels.cpu.layout import (
    ATTEND,
    ATTEND_FEW,
    ATTEND_MANY,
    COS,
    DEEP,
    DOWN,
    HEAD_DIM,
    HEADS,
    K_HEADS,
    KV_FIRST,
    KV_SLOTS,
    KV_START,
    KV_STOP,
    KV_STORE,
    KV_WINDOW,
    LAYERS,
    OUTPUT,
    PROJECT,
    Q_HEADS,
    QKV,
    SCORE_SCALE,
    SIN,
    UP,
)
from kernels.cpu.memory import floats, invoke, number, words


@jit
def _self_attention(
    address: int, stack: int, layer: int, n_tokens: int, offset: int, x: int, room: int, y: int
) -> None:
    """`y = x + output(attention(...))` of one layer; what was there before lies in its store, what is new goes there.

    `room` takes the products (T, (H + 2 K) E), queries and results (T, H E) each, and what `attend` needs.
    """
    tasks, w = words(stack), words(layer)
    h = words(w[HEADS])
    width, n_heads, n_kv_heads, slots = h[HEAD_DIM], h[Q_HEADS], h[K_HEADS], w[KV_SLOTS]
    row, size = (n_heads + 2 * n_kv_heads) * width, 4 * n_tokens * n_heads * width
    k = room + 4 * n_heads * width
    v = k + 4 * n_kv_heads * width
    q = room + 4 * n_tokens * row
    out = q + size
    invoke(tasks[PROJECT], (address, w[QKV], n_tokens, x, 0, 0, room))
    keys = w[KV_STORE] + 4 * (w[KV_STOP] - n_tokens) * width
    values = keys + 4 * n_kv_heads * slots * width
    if w[COS] != 0:
        norm_rope_to(
            address, w[HEADS], n_tokens, offset, room, row, k, row, w[COS], w[SIN], q, keys, width, slots * width
        )
    else:
        put_heads(floats(room), row, n_tokens, n_heads, width, floats(q), n_heads * width, width)
        put_heads(floats(k), row, n_tokens, n_kv_heads, width, floats(keys), width, slots * width)
    put_heads(floats(v), row, n_tokens, n_kv_heads, width, floats(values), width, slots * width)
    arguments = (
        address, tasks[ATTEND_FEW], tasks[ATTEND_MANY], q, n_tokens, n_heads, n_kv_heads, width, w[KV_STORE], slots,
        w[KV_START], w[KV_STOP], w[KV_WINDOW], w[KV_FIRST], number(tasks[SCORE_SCALE]), out + size, out,
    )  # fmt: skip
    invoke(tasks[ATTEND], arguments)
    invoke(tasks[PROJECT], (address, w[OUTPUT], n_tokens, out, x, 0, y))


@entry
def layers(
    address: int, stack: int, n_layers: int, n_tokens: int, offset: int, x: int, between: int, room: int, y: int
) -> None:
    """What is left of (T, D) after `n_layers` layers; T is at most `STACK_TOKENS`.

    Args:
        address: of the pool's control block.
        stack: address of the words that `layout.py` names.
        n_layers: at least one.
        n_tokens: T.
        offset: position of the first token.
        x: address of the input.
        between: address of room for (T, D): what attention leaves of a layer's input.
        room: address of room for the larger of what attention needs and (T, F).
        y: address of the output.
    """
    through = words(stack)[PROJECT]
    for i in range(n_layers):
        layer = stack + 8 * (LAYERS + i * DEEP)
        w = words(layer)
        _self_attention(address, stack, layer, n_tokens, offset, x if i == 0 else y, room, between)
        invoke(through, (address, w[UP], n_tokens, between, 0, 0, room))
        invoke(through, (address, w[DOWN], n_tokens, room, between, 0, y))
