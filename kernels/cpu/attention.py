"""Softmax attention over a store of keys and values, without masks, copies or repeated heads.

A store is (2, G, slots, E): keys, then values, each contiguous per head. The order of summation does not depend on how
many queries there are, nor on which keys are new in a pass:

    Keys are cut into blocks of BLOCK, counted from position 0. A score is a dot product in the order of `tile.py`,
    times the scale. The weights of a block are powers of 2, of each score less the largest score of the block. The sum
    of the weights is that of 16 sums, sum l that of keys l, l + 16, ... of the block, halves added to halves. Values
    are added in the order of keys, from zero, by `sum = fma(weight, value, sum)`. Blocks are joined in their order: the
    running sums and those of the block are scaled by powers of 2 to the larger of both largest scores, and
    `sum = fma(new, its scale, sum * its scale)`.

A key that a query must not see has weight 0, which changes no bit: it is left out where that is easier. Scaling a
running sum is due to Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018) and Dao et al.
("FlashAttention", 2022). Powers of 2 are cheaper than those of e. The NumPy twin is in `attention_numpy.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.exponentials import exp2_below
from kernels.cpu.jit import entry, jit, task
from kernels.cpu.jobs import run
from kernels.cpu.layout import BLOCK, FEW, JOB, LANES, LINE_BYTES, QUERIES, SCORES, TILE_ROWS
from kernels.cpu.linear_job import ceil_div
from kernels.cpu.memory import floats, number, raw, word, words
from kernels.cpu.tile import MOST_VECTORS, set_dots, sum_weighted, tile_vectors
from kernels.cpu.vectors import (
    add,
    between,
    div,
    fma,
    get,
    larger,
    largest_lane,
    load,
    mul,
    prefetch,
    put,
    splat,
    store,
    sub,
    total,
    zeros,
)

# Words of a job. Q is (T, H, E), OUT as well; SLOTS is the store's, START and STOP what is visible of it, FIRST the
# position of slot 0. There are BLOCKS blocks from block BEGIN on. A chunk for many tokens has SPAN of them.
Q, STORE, OUT, T, H, KV, E, SLOTS, START, STOP, WINDOW, FIRST, SCALE, BLOCKS, BEGIN, SPAN = range(16)

# Bytes ahead of the multiplications at which memory is asked for keys.
_AHEAD = 2048

_LEAST = np.float32(-np.inf)


# ---- a block of keys and values ----


@jit
def _scores(
    keys: int, first: int, last: int, q: Any, at: int, n: int, width: int, scores: Any, values: int, far: bool
) -> None:
    """`scores[i SCORES + j] = key j . query i` for keys first to last - 1; three more places may be written behind.

    For few queries memory is `far`: it is asked for what comes next of the keys at address `keys`, and for the values
    at address `values`, which are wanted afterwards, so that it is read in two places at once.
    """
    j, data = first, floats(keys)
    while j + TILE_ROWS <= last:
        if far:
            for ahead in range(4 * j * width, 4 * (j + TILE_ROWS) * width, LINE_BYTES):
                prefetch(raw(keys), ahead + _AHEAD)
                prefetch(raw(values), ahead)
        set_dots(data, j * width, width, q, at, width, n, width, scores, j, SCORES)
        j += TILE_ROWS
    while j < last:
        # There may be no four rows: one is taken four times.
        set_dots(data, j * width, 0, q, at, width, n, width, scores, j, SCORES)
        j += 1


@jit
def _weights(scores: Any, at: int, first: int, last: int, begin: int, end: int, scale: Any) -> Any:
    """Turn the scores of a query into weights, 0 for keys from first to last - 1 that are not in [begin, end).

    Returns:
        The largest scaled score, and the sum of the weights.
    """
    largest, least, factor = splat(_LEAST), splat(_LEAST), splat(scale)
    first -= first % LANES
    for j in range(first, last, LANES):
        scaled = between(begin - j, end - j, mul(load(scores, at + j), factor), least)
        store(scores, at + j, scaled)
        largest = larger(scaled, largest)
    found = largest_lane(largest)
    # Infinity from infinity is not a number.
    base, sums = splat(max(found, np.float32(-3e38))), zeros()
    for j in range(first, last, LANES):
        weight = exp2_below(sub(load(scores, at + j), base))
        store(scores, at + j, weight)
        sums = add(sums, weight)
    return found, total(sums)


@jit
def _attend_block(
    job: Any, head: int, block: int, queries: Any, first_row: int, n: int, n_tokens: int, slot: int, found: Any,
    scores: Any,
) -> bool:  # fmt: skip
    """Attention of at most `tile_vectors()` queries over one block of keys, to the rows of `found`.

    Args:
        job: the words named above.
        head: of the keys and values.
        block: counted from position 0.
        queries: (rows, E); row r is that of token `r % n_tokens`, for one of the heads that share keys.
        first_row: the first query's row.
        n: how many queries there are; their rows follow each other.
        n_tokens: T of the chunk.
        slot: that of the first token. A token sees the slots up to its own.
        found: (n, E + 16): E weighted sums, then the largest score and the sum of the weights.
        scores: room for (n, SCORES).

    Returns:
        Whether any of them sees a key of the block.
    """
    width, start = job[E], block * BLOCK - job[FIRST]
    first, last, row = BLOCK, 0, width + LANES
    for r in range(first_row, first_row + n):
        begin, end = _visible(job, slot + r % n_tokens, start)
        if begin < end:
            first, last = min(first, begin), max(last, end)
    if first >= last:
        return False
    keys = job[STORE] + 4 * (head * job[SLOTS] + start) * width
    values = keys + 4 * job[KV] * job[SLOTS] * width
    _scores(keys, first, last, queries, first_row * width, n, width, scores, values, job[T] <= FEW)
    scale = np.float32(number(job[SCALE]))
    for i in range(n):
        begin, end = _visible(job, slot + (first_row + i) % n_tokens, start)
        largest, sum_ = _weights(scores, i * SCORES, first, last, begin, end, scale)
        put(found, i * row + width, largest)
        put(found, i * row + width + 1, sum_)
    sum_weighted(scores, first, SCORES, n, floats(values), first * width, width, last - first, width, found, 0, row)
    return True


@jit
def _first_visible(job: Any, slot: int) -> Any:
    """Return the first slot that the token of a slot sees."""
    return job[START] if job[WINDOW] == 0 else max(job[START], slot + 1 - job[WINDOW])


@jit
def _visible(job: Any, slot: int, start: int) -> Any:
    """Return which keys of the block that begins at slot `start` the token of a slot sees: the first, and the end."""
    return max(0, _first_visible(job, slot) - start), min(BLOCK, slot + 1 - start)


@jit
def _join(sums: Any, to: int, found: Any, at: int, width: int) -> None:
    """Join what a block has found, `found[at ...]`, to what there is, `sums[to ...]`: rows of `_attend_block`."""
    before, new = get(sums, to + width), get(found, at + width)
    largest = max(before, new)
    if new == _LEAST:
        return
    old_scale, new_scale = exp2_below(splat(before - largest)), exp2_below(splat(new - largest))
    for e in range(0, width, LANES):
        store(sums, to + e, fma(load(found, at + e), new_scale, mul(load(sums, to + e), old_scale)))
    old, more = splat(get(sums, to + width + 1)), splat(get(found, at + width + 1))
    store(sums, to + width, fma(more, new_scale, mul(old, old_scale)))
    put(sums, to + width + 1, get(sums, to + width))
    put(sums, to + width, largest)


@jit
def _finish(sums: Any, at: int, width: int, out: Any, to: int) -> None:
    """`out[to ...]` is the weighted sums by the sum of the weights."""
    divisor = splat(get(sums, at + width + 1))
    for e in range(0, width, LANES):
        store(out, to + e, div(load(sums, at + e), divisor))


@jit
def _copy_queries(job: Any, head: int, t: int, n_tokens: int, queries: Any) -> None:
    """The queries of the heads that share keys, (group, n_tokens, E), of tokens from t on."""
    width, group = job[E], job[H] // job[KV]
    for g in range(group):
        for i in range(n_tokens):
            q, to = floats(job[Q] + 4 * ((t + i) * job[H] + head * group + g) * width), (g * n_tokens + i) * width
            for e in range(0, width, LANES):
                store(queries, to + e, load(q, e))


# ---- few tokens: a chunk is a block ----


@task
def attend_few(job: Any, chunk: int, scratch: int) -> None:
    """All tokens and the heads that share keys over one block. OUT holds what it finds, (T, H, BLOCKS, E + 16)."""
    width, group, n_tokens = job[E], job[H] // job[KV], job[T]
    head, block = chunk // job[BLOCKS], chunk % job[BLOCKS]
    rows, row = group * n_tokens, width + LANES
    # Scratch memory: queries, then what is found for a tile of them, then their scores.
    queries, found = floats(scratch), floats(scratch + 4 * rows * width)
    scores, out = floats(scratch + 4 * (rows * width + MOST_VECTORS * row)), floats(job[OUT])
    _copy_queries(job, head, 0, n_tokens, queries)
    tiles = ceil_div(rows, tile_vectors())
    for tile in range(tiles):
        first, last = tile * rows // tiles, (tile + 1) * rows // tiles
        seen = _attend_block(
            job, head, job[BEGIN] + block, queries, first, last - first, n_tokens, job[STOP] - n_tokens, found, scores
        )
        for r in range(first, last):
            to = ((r % n_tokens * job[H] + head * group + r // n_tokens) * job[BLOCKS] + block) * row
            for e in range(0, row, LANES):
                store(out, to + e, load(found, (r - first) * row + e) if seen else zeros())
            if not seen:
                put(out, to + width, _LEAST)


# ---- many tokens: a chunk is a span of them ----


@task
def attend_many(job: Any, chunk: int, scratch: int) -> None:
    """The queries of one key/value head and one span of tokens, the last span first: it sees most.

    Spans of one head follow each other, so that its keys stay near, and every thread ends with a short one.
    """
    width, group = job[E], job[H] // job[KV]
    n_spans = ceil_div(job[T], job[SPAN])
    head, t = chunk // n_spans, (n_spans - 1 - chunk % n_spans) * job[SPAN]
    n_tokens, slot = min(job[SPAN], job[T] - t), job[STOP] - job[T] + t
    rows, row = group * n_tokens, width + LANES
    # Scratch memory: queries, what there is for each of them, then what is found for a tile of them, and their scores.
    queries, sums = floats(scratch), floats(scratch + 4 * rows * width)
    found = floats(scratch + 4 * rows * (width + row))
    scores, out = floats(scratch + 4 * (rows * (width + row) + MOST_VECTORS * row)), floats(job[OUT])
    _copy_queries(job, head, t, n_tokens, queries)
    for r in range(rows):
        for e in range(0, row, LANES):
            store(sums, r * row + e, zeros())
        put(sums, r * row + width, _LEAST)
    tiles, block = ceil_div(rows, tile_vectors()), (job[FIRST] + _first_visible(job, slot)) // BLOCK
    while block * BLOCK - job[FIRST] < slot + n_tokens:
        for tile in range(tiles):
            first, last = tile * rows // tiles, (tile + 1) * rows // tiles
            if _attend_block(job, head, block, queries, first, last - first, n_tokens, slot, found, scores):
                for r in range(first, last):
                    _join(sums, r * row, found, (r - first) * row, width)
        block += 1
    for r in range(rows):
        _finish(sums, r * row, width, out, ((t + r % n_tokens) * job[H] + head * group + r // n_tokens) * width)


@entry
def attend(
    address: int, few: int, many: int, q: int, n_tokens: int, n_heads: int, n_kv_heads: int, width: int, store: int,
    slots: int, start: int, stop: int, window: int, first: int, scale: float, parts: int, out: int,
) -> None:  # fmt: skip
    """(T, H, E) attention of queries over slots [start, stop) of a store, of which the last T are the queries' own.

    Args:
        address: of the pool's control block.
        few: address of `attend_few`.
        many: address of `attend_many`.
        q: address of (T, H, E).
        n_tokens: T.
        n_heads: H.
        n_kv_heads: G.
        width: E, a multiple of 16; `layout.attention_scratch` says what it may be at most.
        store: address of (2, G, slots, E).
        slots: of the store.
        start: the first slot that is visible.
        stop: the slot behind the last one.
        window: how many of the last ones a token sees; 0 is all.
        first: position of slot 0.
        scale: of the scores.
        parts: address of room for T H (E + 16) floats for each block that has visible keys; for up to `FEW` tokens.
        out: address of (T, H, E).
    """
    control = words(address)
    if window > 0:
        start = max(start, stop - n_tokens + 1 - window)
    job, begin = control[JOB:], (first + start) // BLOCK
    n_blocks = ceil_div(first + stop, BLOCK) - begin
    job[Q], job[STORE], job[T], job[H], job[KV], job[E] = q, store, n_tokens, n_heads, n_kv_heads, width
    job[SLOTS], job[START], job[STOP], job[WINDOW], job[SCALE], job[BLOCKS] = (
        slots, start, stop, window, word(scale / math.log(2)), n_blocks,
    )  # fmt: skip
    job[FIRST], job[BEGIN] = first, begin
    if n_tokens > FEW:
        span = max(1, QUERIES * n_kv_heads // (n_heads * LANES)) * LANES
        job[OUT], job[SPAN] = out, span
        run(control, many, n_kv_heads * ceil_div(n_tokens, span))
        return
    job[OUT] = parts
    run(control, few, n_kv_heads * n_blocks)
    sums, row = floats(parts), width + LANES
    for r in range(n_tokens * n_heads):
        for block in range(1, n_blocks):
            _join(sums, r * n_blocks * row, sums, (r * n_blocks + block) * row, width)
        _finish(sums, r * n_blocks * row, width, floats(out), r * width)
