"""Softmax attention over a store of keys and values, without masks, copies or repeated heads.

A store is (2, K, slots, E): keys, then values, each contiguous per head. The sums of a softmax are kept running: when a
larger score comes, what has been added up so far is scaled down (Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018; Dao et al., "FlashAttention", 2022). Scores are scaled so that weights are powers of 2, not of e:
those are cheaper. The NumPy twin is in `attention_numpy.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.gemm import multiply_add, pack
from kernels.cpu.jit import entry, jit, task
from kernels.cpu.jobs import run
from kernels.cpu.layout import BLOCK, JOB, KEYS, LANES, QUERIES, WAYS
from kernels.cpu.memory import floats, number, word, words
from kernels.cpu.vectors import (
    add,
    between,
    div,
    exp2_below,
    fma,
    get,
    larger,
    load,
    load_splat,
    mul,
    put,
    splat,
    store,
    store_columns,
    sub,
    total,
    zeros,
)  # fmt: skip

# Words of a job. Q is (T, H, E), OUT as well; SLOTS is the store's, START and STOP what is visible of it.
Q, STORE, OUT, T, H, KV, E, SLOTS, START, STOP, WINDOW, SCALE, PARTS, SPAN = range(14)

# Slots of each stretch in a part.
OF_EACH = KEYS // WAYS

_LEAST = np.float32(-np.inf)


@jit
def _score(q: Any, query: int, keys: Any, key: int, width: int) -> Any:
    """The product of a query with a key."""
    sums = zeros()
    for e in range(0, width, LANES):
        sums = fma(load(keys, key + e), load(q, query + e), sums)
    return total(sums)


@jit
def _scores_of_four(q: Any, query: int, keys: Any, key: int, apart: int, width: int) -> Any:
    """The products of a query with four keys, which are `apart` elements apart."""
    i, j, k = key + apart, key + 2 * apart, key + 3 * apart
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for e in range(0, width, LANES):
        x = load(q, query + e)
        a, b = fma(load(keys, key + e), x, a), fma(load(keys, i + e), x, b)
        c, d = fma(load(keys, j + e), x, c), fma(load(keys, k + e), x, d)
    return total(a), total(b), total(c), total(d)


@jit
def _accumulate(weights: Any, at: int, values: Any, value: int, width: int, sums: Any, to: int) -> None:
    """`sums[to ...] += weights[at] * values[value ...]`."""
    weight = load_splat(weights, at)
    for e in range(0, width, LANES):
        store(sums, to + e, fma(weight, load(values, value + e), load(sums, to + e)))


@jit
def _accumulate_four(
    weights: Any, at: int, values: Any, value: int, apart: int, width: int, sums: Any, to: int
) -> None:
    """The same for the weights from `at` on and four values, which are `apart` elements apart."""
    i, j, k = value + apart, value + 2 * apart, value + 3 * apart
    a, b, c, d = (
        load_splat(weights, at), load_splat(weights, at + 1), load_splat(weights, at + 2), load_splat(weights, at + 3),
    )  # fmt: skip
    for e in range(0, width, LANES):
        first = fma(b, load(values, i + e), fma(a, load(values, value + e), load(sums, to + e)))
        store(sums, to + e, fma(d, load(values, k + e), fma(c, load(values, j + e), first)))


@jit
def _exponentials(scores: Any, first: int, n: int) -> Any:
    """Scores become `2**(score - largest)`; returns the largest and their sum. Behind them must be 15 spare places."""
    largest = _LEAST
    for i in range(n):
        largest = max(largest, scores[first + i])
    scores[first + n : first + n + LANES - 1] = _LEAST
    sums, shift = zeros(), splat(largest)
    for i in range(0, n, LANES):
        e = exp2_below(sub(load(scores, first + i), shift))
        store(scores, first + i, e)
        sums = add(sums, e)
    return largest, total(sums)


@task
def attend_one(job: Any, chunk: int, scratch: int) -> None:
    """One query token: the queries of one key/value head over one part of the keys.

    A part has slots of each of WAYS stretches, in turns, for memory is faster when it is read in several places at
    once; the last part also has what is left behind them. OUT holds, per query head and part, the largest score, the
    sum of the exponentials, then E weighted sums.
    """
    width, group, visible = job[E], job[H] // job[KV], job[STOP] - job[START]
    head, part = chunk // job[PARTS], chunk % job[PARTS]
    stretch = visible // WAYS
    first = part * OF_EACH
    n = min(OF_EACH, stretch - first)
    # Slots behind the last stretch, and how many this part has of all.
    rest = visible - WAYS * stretch if part == job[PARTS] - 1 else 0
    n_keys, apart = WAYS * n + rest, stretch * width
    begin = 4 * (head * job[SLOTS] + job[START]) * width
    keys, values = floats(job[STORE] + begin), floats(job[STORE] + begin + 4 * job[KV] * job[SLOTS] * width)
    q, out = floats(job[Q] + 4 * head * group * width), floats(job[OUT])
    # Scratch memory: scores (group, row), then sums (group, E).
    row = KEYS + 2 * LANES
    scores, sums = floats(scratch), floats(scratch + 4 * group * row)
    scale = np.float32(number(job[SCALE]))
    for i in range(n):
        for g in range(group):
            a, b, c, d = _scores_of_four(q, g * width, keys, (first + i) * width, apart, width)
            at = g * row + WAYS * i
            put(scores, at, a * scale)
            put(scores, at + 1, b * scale)
            put(scores, at + 2, c * scale)
            put(scores, at + 3, d * scale)
    for i in range(rest):
        for g in range(group):
            score = _score(q, g * width, keys, (WAYS * stretch + i) * width, width)
            put(scores, g * row + WAYS * n + i, score * scale)
    for g in range(group):
        to = ((head * group + g) * job[PARTS] + part) * (width + 2)
        out[to], out[to + 1] = _exponentials(scores, g * row, n_keys)
    sums[: group * width] = 0
    for i in range(n):
        for g in range(group):
            at = g * row + WAYS * i
            _accumulate_four(scores, at, values, (first + i) * width, apart, width, sums, g * width)
    for i in range(rest):
        for g in range(group):
            at = g * row + WAYS * n + i
            _accumulate(scores, at, values, (WAYS * stretch + i) * width, width, sums, g * width)
    for g in range(group):
        to = ((head * group + g) * job[PARTS] + part) * (width + 2) + 2
        for e in range(0, width, LANES):
            store(out, to + e, load(sums, g * width + e))


@jit
def _join(parts: Any, at: int, n_parts: int, width: int, out: Any, to: int) -> None:
    """The attention of a query whose keys were looked at in parts."""
    largest, sums = _LEAST, zeros()
    for p in range(n_parts):
        largest = max(largest, parts[at + p * (width + 2)])
    for e in range(0, width, LANES):
        store(out, to + e, zeros())
    for p in range(n_parts):
        row = at + p * (width + 2)
        factor = exp2_below(splat(parts[row] - largest))
        sums = fma(factor, splat(parts[row + 1]), sums)
        for e in range(0, width, LANES):
            store(out, to + e, fma(factor, load(parts, row + 2 + e), load(out, to + e)))
    for e in range(0, width, LANES):
        store(out, to + e, div(load(out, to + e), sums))


@jit
def _visible(scores: Any, n_keys: int, first: int, key: int, window: int) -> None:
    """Scores of keys that a query must not see become minus infinity: later ones, and those behind the window.

    `scores` is (n_keys, 16); lane i is the query of slot `first + i`, row j the key of slot `key + j`.
    """
    least = splat(_LEAST)
    for j in range(n_keys):
        row = key + j - first  # the first lane that sees the key
        last = row + window if window > 0 else LANES
        store(scores, j * LANES, between(row, last, load(scores, j * LANES), least))


@jit
def _attend_panel(scores: Any, n_keys: int, state: Any, at: int, values: Any, row: int, width: int) -> None:
    """A block of keys and values joins what 16 queries have seen; `state[at ...]` is (2 + E, 16).

    Its rows are the largest score, the sum, and E weighted sums. Scores are (n_keys, 16), scaled. Values lie `row`
    elements apart.
    """
    before = load(state, at)
    largest = before
    for j in range(n_keys):
        largest = larger(load(scores, j * LANES), largest)
    # A query that has seen nothing yet has minus infinity here, and infinity from infinity is not a number.
    base = larger(largest, splat(np.float32(-3e38)))
    factor = exp2_below(sub(before, base))
    sums = mul(load(state, at + LANES), factor)
    for j in range(n_keys):
        e = exp2_below(sub(load(scores, j * LANES), base))
        store(scores, j * LANES, e)
        sums = add(sums, e)
    store(state, at, largest)
    store(state, at + LANES, sums)
    for e in range(2, width + 2):
        store(state, at + e * LANES, mul(load(state, at + e * LANES), factor))
    multiply_add(values, 0, 1, row, width, scores, 0, state, at + 2 * LANES, n_keys)


@jit
def _finish(state: Any, at: int, width: int, out: Any, to: int) -> None:
    """`out[to + lane * width + e]` is what each of 16 queries has seen: its weighted sums by the sum of the weights."""
    sums = load(state, at + LANES)
    for e in range(0, width, 4):
        first = at + (e + 2) * LANES
        store_columns(
            out, to + e, width,
            div(load(state, first), sums),
            div(load(state, first + LANES), sums),
            div(load(state, first + 2 * LANES), sums),
            div(load(state, first + 3 * LANES), sums),
        )  # fmt: skip


@task
def attend_many(job: Any, chunk: int, scratch: int) -> None:
    """Many query tokens: those of one key/value head and one span of tokens, the last span first: it sees most.

    Spans of one head follow each other, so that its keys stay near, and every thread ends with a short one.
    """
    width, group = job[E], job[H] // job[KV]
    n_spans = (job[T] + job[SPAN] - 1) // job[SPAN]
    head, span = chunk // n_spans, n_spans - 1 - chunk % n_spans
    t = span * job[SPAN]
    n_tokens = min(job[SPAN], job[T] - t)
    n_panels = (n_tokens + LANES - 1) // LANES
    keys = floats(job[STORE] + 4 * head * job[SLOTS] * width)
    values = floats(job[STORE] + 4 * (job[KV] + head) * job[SLOTS] * width)
    q, out = floats(job[Q]), floats(job[OUT])
    # Slot of the span's first token; a token sees the slots up to its own.
    slot = job[STOP] - job[T] + t
    first = job[START] if job[WINDOW] == 0 else max(job[START], slot + 1 - job[WINDOW])
    row = job[H] * width
    # Scratch memory: scores (BLOCK, 16), a block of values, then per panel the packed queries (E, 16) and the state.
    size, apart, queries_at = LANES * (width + 2), width + LANES, BLOCK * (width + 2 * LANES)
    scores, block, queries = floats(scratch), floats(scratch + 4 * BLOCK * LANES), floats(scratch + 4 * queries_at)
    state = floats(scratch + 4 * (queries_at + group * n_panels * LANES * width))
    state[: group * n_panels * size] = 0
    for g in range(group):
        for p in range(n_panels):
            source, lanes = (t + p * LANES) * row + (head * group + g) * width, min(LANES, n_tokens - p * LANES)
            panel = g * n_panels + p
            pack(q, source, row, lanes, width, np.float32(number(job[SCALE])), queries, panel * LANES * width)
            store(state, panel * size, splat(_LEAST))
    for key in range(first, slot + n_tokens, BLOCK):
        # Values are read by column, and a power of two apart their rows would share a few places of the nearest cache.
        for i in range(min(BLOCK, slot + n_tokens - key)):
            for e in range(0, width, LANES):
                store(block, i * apart + e, load(values, (key + i) * width + e))
        for panel in range(group * n_panels):
            query = slot + panel % n_panels * LANES
            n_keys = min(BLOCK, min(job[STOP], query + LANES) - key)
            if n_keys <= 0:
                continue
            scores[: n_keys * LANES] = 0
            multiply_add(keys, key * width, width, 1, n_keys, queries, panel * LANES * width, scores, 0, width)
            if key + n_keys > query + 1 or job[WINDOW] > 0:
                _visible(scores, n_keys, query, key, job[WINDOW])
            _attend_panel(scores, n_keys, state, panel * size, block, apart, width)
    for panel in range(group * n_panels):
        head_, first_token = head * group + panel // n_panels, t + panel % n_panels * LANES
        # The queries have done their duty; their place is as large.
        place = panel * LANES * width
        _finish(state, panel * size, width, queries, place)
        for lane in range(min(LANES, t + n_tokens - first_token)):
            target = (first_token + lane) * row + head_ * width
            for e in range(width):
                put(out, target + e, get(queries, place + lane * width + e))


@entry
def attend(
    address: int, one: int, many: int, q: int, n_tokens: int, n_heads: int, n_kv_heads: int, width: int, store: int,
    slots: int, start: int, stop: int, window: int, scale: float, parts: int, out: int,
) -> None:  # fmt: skip
    """(T, H, E) attention of queries over slots [start, stop) of a store, of which the last T are the queries' own.

    Args:
        address: of the pool's control block.
        one: address of `attend_one`.
        many: address of `attend_many`.
        q: address of (T, H, E).
        n_tokens: T.
        n_heads: H.
        n_kv_heads: K.
        width: E, a multiple of 16; `layout.attention_scratch` says what it may be at most.
        store: address of (2, K, slots, E).
        slots: of the store.
        start: the first slot that is visible.
        stop: the slot behind the last one.
        window: how many of the last ones a token sees; 0 is all.
        scale: of the scores.
        parts: address of room for H (E + 2) floats for each `KEYS` of the visible keys; for one token alone.
        out: address of (T, H, E).
    """
    control = words(address)
    if n_tokens == 1 and window > 0:
        start = max(start, stop - window)
    n_parts = max(1, ((stop - start) // WAYS + OF_EACH - 1) // OF_EACH)
    job = control[JOB:]
    job[Q], job[STORE], job[T], job[H], job[KV], job[E] = q, store, n_tokens, n_heads, n_kv_heads, width
    job[SLOTS], job[START], job[STOP], job[WINDOW], job[SCALE], job[PARTS] = (
        slots, start, stop, window, word(scale / math.log(2)), n_parts,
    )  # fmt: skip
    if n_tokens > 1:
        span = max(1, QUERIES * n_kv_heads // (n_heads * LANES)) * LANES
        job[OUT], job[SPAN] = out, span
        run(control, many, n_kv_heads * ((n_tokens + span - 1) // span))
        return
    job[OUT] = parts
    run(control, one, n_kv_heads * n_parts)
    for h in range(n_heads):
        _join(floats(parts), h * n_parts * (width + 2), n_parts, width, floats(out), h * width)
