"""Softmax attention over pages of keys and values, which are read in place.

A store is a contiguous array (2, G, slots, E) of keys, then values, in one of the types of `stored.py`. If the keys
are also the values, its shape is (1, G, slots, E). A slot is the place of one token, and a page is a range of slots. In
a pass, only the last tokens of a sequence have queries. Masks are not stored, float32 keys and values are not copied,
and KV heads are not repeated for their query heads. A task is a function that a thread runs on one chunk of work at a
time. There are two tasks, which give the same bits:

- decode (up to SMALL_BATCH query tokens in the pass): a chunk is one block of keys of one KV head, so that several
  threads share a long sequence
- prefill (more query tokens): a chunk is one KV head and a span of the tokens of one sequence, over all blocks of keys

The order of summation does not depend on the number of queries or sequences of a pass, on pages, or on which keys are
new in the pass:

- Keys are cut into blocks of BLOCK keys, counted from position 0.
- A score is `scale * dot(query, key)`; `tile.py` defines the order of the terms of the dot product. With a soft cap,
  the score becomes `cap * tanh(score / cap)`.
- The weight of a key is `2 ** (score - largest score of the block)`, because powers of 2 are cheaper than powers of e.
  So `attend` multiplies `scale` (with a soft cap: `cap`) by log2(e) beforehand.
- The weights of a block are added in 16 sums: sum l adds the weights of keys l, l + 16, ... of the block. Then sums
  that are 8, 4, 2 and 1 apart are added.
- The weighted values of a block are added in the order of keys, from zero, by `sum = fma(weight, value, sum)`.
- Blocks are joined in ascending order. With `m = max(largest score so far, largest score of the block)`, each sum (of
  weights or of weighted values) becomes
  `fma(sum of the block, 2 ** (largest score of the block - m), sum * 2 ** (largest score so far - m))`.
- A sink (a learned logit of a query head, which belongs to no token) is joined after the last block, as a key whose
  value is 0.

A masked key has weight 0, which changes no bit, so masked keys at the ends of a block are skipped. The running sum is
rescaled as in Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018) and Dao et al.
("FlashAttention", 2022). `order_numpy.attend` is the bit-identical reference in NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..build.exponentials import exp2_below, tanh
from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    BLOCK,
    JOB,
    KV_F32,
    LANES,
    LINE_BYTES,
    SCORES,
    SEQ_BEGIN,
    SEQ_BLOCKS,
    SEQ_CHUNK,
    SEQ_LENGTH,
    SEQ_PAGES,
    SEQ_PART,
    SEQ_ROW,
    SEQ_WIDTH,
    SMALL_BATCH,
    TILE_ROWS,
    attention_span,
)
from ..build.memory import floats, number, raw, word, words
from ..build.vectors import (
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
from ..products.linear_job import ceil_div
from ..products.tile import MOST_VECTORS, tile_vectors
from .stored import expand_rows, row_bytes, set_dots, sum_weighted

# Words (int64) of an attention job. Most are arguments of `attend` (TYPE is `kind`); in decode, OUT is `parts`. SPAN is
# the number of tokens of a chunk in prefill. SCALE and INNER_SCALE are bits of float64. Without a soft cap, SCALE is
# `scale * log2(e)`, and INNER_SCALE is 0. With a soft cap, SCALE is `softcap * log2(e)`, and INNER_SCALE is
# `scale / softcap`: a score is then `SCALE * tanh(INNER_SCALE * dot product)`.
(
    Q, STORE, OUT, H, G, E, SLOTS, PAGE, WINDOW, SCALE, SEQUENCES, N_SEQUENCES, COLUMN, SPAN, INNER_SCALE, SINKS, TYPE,
    ARRAYS,
) = range(18)  # fmt: skip

_span = jit(attention_span)
# The largest score of a block in which no key is visible.
LEAST = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
# Prefetch distance in bytes.
_AHEAD = 2048
# A tile is up to `tile_vectors()` queries. _TILES tiles are multiplied with the same keys and values while these are in
# the L1 cache. With one tile at a time, the L2 cache would be read at 21 bytes per cycle, nearly the L2 bandwidth of a
# Zen 3 core. _NEAR is the number of floats of keys or values that the tiles read at a time: half of an L1 cache of
# 32 KB.
_TILES, _NEAR = 2, 4096
# In decode with several tiles of queries, rows that are not float32 are expanded to float32, _PIECE rows at a time, so
# that the expanded rows stay in the L1 cache.
_PIECE = 8


@jit
def _scores(
    kind: int, keys: int, first: int, last: int, q: Any, at: int, n: int, width: int, scores: Any, values: int,
    far: bool,
) -> None:  # fmt: skip
    """Write `dot(key j, query i)` to `scores[i * SCORES + j]` for keys j from `first` to `last - 1` and n queries i.

    The queries are at most two tiles. Up to three more scores may be written after the score of the last key. With
    `far`, prefetch later keys, and the values of these keys; `values` is the address of value 0. `far` is for a
    sequence with few queries, whose keys and values are in no cache and are read only once.
    """
    row, middle, ahead = row_bytes(kind, width), _first_tile(n), _AHEAD if far else 0
    step = last - first if middle == n else max(TILE_ROWS, _NEAR // width)
    for j in range(first, last, step):
        size, key, value = min(step, last - j), keys + j * row, values + j * row
        set_dots(kind, key, row, size, q, at, width, middle, width, scores, j, SCORES, ahead, value)
        if middle < n:
            set_dots(
                kind, key, row, size, q, at + middle * width, width, n - middle, width, scores, middle * SCORES + j,
                SCORES, 0, 0,
            )  # fmt: skip


@jit
def _first_tile(n: int) -> int:
    """Return how many of n queries are in the first of at most two tiles."""
    return n if n <= tile_vectors() else (n + 1) // 2


@jit
def _values(
    kind: int, values: int, first: int, last: int, begun: int, scores: Any, n: int, width: int, found: Any, row: int
) -> None:
    """Write `sum(scores[i * SCORES + j] * values[j * width + e])` to `found[i * row + e]` for n queries i.

    `scores` has the weights (`_weights`). The sum is over keys j from `first` to `last - 1`, in order. The queries are
    at most two tiles. If `begun` is not 0, the sums begin with the numbers in `found`, not with 0.
    """
    middle, stored = _first_tile(n), row_bytes(kind, width)
    keys = last - first if middle == n else max(TILE_ROWS, _NEAR // width)
    for j in range(first, last, keys):
        size, more = min(keys, last - j), begun + j - first
        value = values + j * stored
        sum_weighted(kind, scores, j, SCORES, middle, value, stored, size, width, found, 0, row, more)
        if middle < n:
            sum_weighted(
                kind, scores, middle * SCORES + j, SCORES, n - middle, value, stored, size, width, found, middle * row,
                row, more,
            )  # fmt: skip


@jit
def _squash(scores: Any, at: int, first: int, last: int, scale: Any) -> None:
    """Replace the scores of a query for keys `first` to `last - 1` by `tanh(scale * score)`."""
    factor = splat(scale)
    for j in range(first - first % LANES, last, LANES):
        store(scores, at + j, tanh(mul(load(scores, at + j), factor)))


@jit
def _weights(scores: Any, at: int, first: int, last: int, begin: int, end: int, scale: Any) -> Any:
    """Replace the scores of a query for keys `first` to `last - 1` by weights, which are 0 outside of [begin, end).

    Return the largest score, multiplied by `scale`, and the sum of the weights.
    """
    largest, least, factor = splat(LEAST), splat(LEAST), splat(scale)
    first -= first % LANES
    for j in range(first, last, LANES):
        scaled = between(begin - j, end - j, mul(load(scores, at + j), factor), least)
        store(scores, at + j, scaled)
        largest = larger(scaled, largest)
    found = largest_lane(largest)
    # If no key is visible, `found` is -inf, and -inf minus -inf would be NaN.
    base, sums = splat(max(found, np.float32(-3e38))), zeros()
    for j in range(first, last, LANES):
        weight = exp2_below(sub(load(scores, at + j), base))
        store(scores, at + j, weight)
        sums = add(sums, weight)
    return found, total(sums)


@jit
def attend_block(
    job: Any, sequence: Any, head: int, block: int, queries: Any, first_row: int, n: int, n_tokens: int, position: int,
    found: Any, scores: Any, expanded: int, memory: int,
) -> bool:  # fmt: skip
    """Compute attention of at most two tiles of queries over one block of keys; write the results to `found`.

    Return whether any of the queries attends to a key of the block.

    Args:
        job: words of the job.
        sequence: words of the sequence that has the queries.
        head: the KV head.
        block: number of the block, counted from position 0.
        queries: (rows, E); row r is the query of token `r % n_tokens`, of a query head that uses this KV head.
        first_row: row of the first query to process.
        n: number of queries to process, in consecutive rows.
        n_tokens: number of tokens of the chunk.
        position: position of the chunk's first token.
        found: (n, E + 16): E weighted sums, then the largest score and the sum of the weights.
        scores: scratch memory for (n, SCORES) floats.
        expanded: address of the float32 keys and values of the block, (2, BLOCK, E), which `_expand` wrote; 0 to read
            the store.
        memory: address of scratch memory for _PIECE expanded rows.
    """
    width, start = job[E], block * BLOCK
    first, last, row = BLOCK, 0, width + LANES
    for r in range(first_row, first_row + n):
        begin, end = _visible(job, position + r % n_tokens, start)
        if begin < end:
            first, last = min(first, begin), max(last, end)
    if first >= last:
        return False
    pages, kind = words(sequence[SEQ_PAGES]), KV_F32 if expanded != 0 else job[TYPE]
    # For a single tile, rows are converted in registers. For several, expanding each row once, to memory, is faster.
    in_pieces = kind != KV_F32 and n > tile_vectors()
    by_value = 4 * width * BLOCK if expanded != 0 else _by_value(job)
    far, j = expanded == 0 and sequence[job[COLUMN]] <= SMALL_BATCH, first
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last, expanded)
        if in_pieces:
            stop = min(stop, j + _PIECE)
            _expand_piece(job[TYPE], keys, j, stop, width, memory, by_value)
            _scores(KV_F32, memory - 4 * j * width, j, stop, queries, first_row * width, n, width, scores, 0, False)
        else:
            _scores(kind, keys, j, stop, queries, first_row * width, n, width, scores, keys + by_value, far)
        j = stop
    scale, inner_scale = np.float32(number(job[SCALE])), np.float32(number(job[INNER_SCALE]))
    for i in range(n):
        begin, end = _visible(job, position + (first_row + i) % n_tokens, start)
        if inner_scale != 0:
            _squash(scores, i * SCORES, first, last, inner_scale)
        largest, sum_ = _weights(scores, i * SCORES, first, last, begin, end, scale)
        put(found, i * row + width, largest)
        put(found, i * row + width + 1, sum_)
    j = first
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last, expanded)
        values = keys + by_value
        if in_pieces:
            stop = min(stop, j + _PIECE)
            _expand_piece(job[TYPE], values, j, stop, width, memory, 0)
            values = memory - 4 * j * width
        _values(KV_F32 if in_pieces else kind, values, j, stop, j - first, scores, n, width, found, row)
        j = stop
    return True


@jit
def _expand_piece(kind: int, rows: int, j: int, stop: int, width: int, memory: int, by_value: int) -> None:
    """Expand rows j to `stop - 1` to floats at address `memory`, and prefetch later rows; row 0 is at address `rows`.

    If `by_value` is not 0, the rows are keys; also prefetch their values, which are `by_value` bytes after them.
    """
    row = row_bytes(kind, width)
    for at in range(j * row, stop * row, LINE_BYTES):
        prefetch(raw(rows), at + _AHEAD)
        if by_value != 0:
            prefetch(raw(rows), at + by_value)
    expand_rows(kind, rows + j * row, (stop - j) * width, memory)


@jit
def _by_value(job: Any) -> int:
    """Return the distance in bytes from a key to its value in the store; 0 if keys are also the values."""
    size: int = (job[ARRAYS] - 1) * job[G] * job[SLOTS] * row_bytes(job[TYPE], job[E])
    return size


@jit
def _expand(job: Any, sequence: Any, head: int, block: int, position: int, n_tokens: int, memory: int) -> int:
    """Expand the keys of a block to which any of `n_tokens` tokens attends, and their values.

    The first of the tokens is at `position`. Return `memory`, the address of (2, BLOCK, E) floats; if the store is
    float32, expand nothing and return 0.
    """
    kind, width, start = job[TYPE], job[E], block * BLOCK
    if kind == KV_F32:
        return 0
    pages, row = words(sequence[SEQ_PAGES]), row_bytes(kind, width)
    j, _ = _visible(job, position, start)
    last, by_value = min(BLOCK, position + n_tokens - start), _by_value(job)
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last, 0)
        at = memory + 4 * j * width
        expand_rows(kind, keys + j * row, (stop - j) * width, at)
        expand_rows(kind, keys + by_value + j * row, (stop - j) * width, at + 4 * BLOCK * width)
        j = stop
    return memory


@jit
def _key_run(job: Any, pages: Any, head: int, start: int, j: int, last: int, expanded: int) -> Any:
    """Find the longest run of a head's keys that begins at key j of a block and is contiguous in memory.

    Return an address from which key i of the block, if it is in the run, is i rows away; and the number of the key
    after the run, which is at most `last`. The block begins at position `start`. If `expanded` is not 0, it is the
    address of key 0, and all keys of the block are contiguous.
    """
    if expanded != 0:
        return expanded, last
    size = job[PAGE]
    page = (start + j) // size
    slot, stop = pages[page] + start + j - page * size, (page + 1) * size - start
    # Consecutive pages are often adjacent in memory; joining adjacent pages into one run saves calls.
    while stop < last and pages[page + 1] == pages[page] + size:
        page, stop = page + 1, stop + size
    return job[STORE] + (head * job[SLOTS] + slot - j) * row_bytes(job[TYPE], job[E]), min(stop, last)


@jit
def first_visible(job: Any, position: int) -> Any:
    """Return the first position that the token at `position` attends to."""
    if job[WINDOW] < 0:
        return position - position % -job[WINDOW]
    return 0 if job[WINDOW] == 0 else max(0, position + 1 - job[WINDOW])


@jit
def _visible(job: Any, position: int, start: int) -> Any:
    """Return `begin, end`: the token at `position` attends to keys `begin` to `end - 1` of the block at `start`."""
    return max(0, first_visible(job, position) - start), min(BLOCK, position + 1 - start)


@jit
def join(sums: Any, to: int, found: Any, at: int, width: int) -> None:
    """Join a block's result `found[at:]` to the running result `sums[to:]`, each E + 16 floats as in `attend_block`."""
    before, new = get(sums, to + width), get(found, at + width)
    largest = max(before, new)
    if new == LEAST:
        return
    old_scale, new_scale = exp2_below(splat(before - largest)), exp2_below(splat(new - largest))
    for e in range(0, width, LANES):
        store(sums, to + e, fma(load(found, at + e), new_scale, mul(load(sums, to + e), old_scale)))
    old, more = splat(get(sums, to + width + 1)), splat(get(found, at + width + 1))
    store(sums, to + width, fma(more, new_scale, mul(old, old_scale)))
    put(sums, to + width + 1, get(sums, to + width))
    put(sums, to + width, largest)


@jit
def _join_sink(sums: Any, at: int, width: int, sink: Any) -> None:
    """Join a sink to the running result, as a key with score `sink` (multiplied by log2(e)) and value 0."""
    before = get(sums, at + width)
    largest = max(before, sink)
    old_scale, new_scale = exp2_below(splat(before - largest)), exp2_below(splat(sink - largest))
    for e in range(0, width, LANES):
        store(sums, at + e, mul(load(sums, at + e), old_scale))
    store(sums, at + width, add(new_scale, mul(splat(get(sums, at + width + 1)), old_scale)))
    put(sums, at + width + 1, get(sums, at + width))


@jit
def finish(job: Any, head: int, sums: Any, at: int, width: int, out: Any, to: int) -> None:
    """Write the result of a query of query head `head` to `out[to:]`: E weighted sums divided by the sum of weights."""
    if job[SINKS] != 0:
        _join_sink(sums, at, width, get(floats(job[SINKS]), head) * LOG2_E)
    divisor = splat(get(sums, at + width + 1))
    for e in range(0, width, LANES):
        store(out, to + e, div(load(sums, at + e), divisor))


# ---- jobs ----


@jit
def _copy_queries(job: Any, head: int, first: int, n_tokens: int, queries: Any) -> None:
    """Copy the queries of `n_tokens` tokens, from row `first` of Q on, for the query heads that use KV head `head`.

    Write (query heads, n_tokens, E) to `queries`.
    """
    width, group = job[E], job[H] // job[G]
    for g in range(group):
        for i in range(n_tokens):
            q, to = floats(job[Q] + 4 * ((first + i) * job[H] + head * group + g) * width), (g * n_tokens + i) * width
            for e in range(0, width, LANES):
                store(queries, to + e, load(q, e))


@jit
def _memory_after(scores: int) -> int:
    """Return the address of the scratch memory for expanded rows: the first cache line after the scores."""
    return (scores + 4 * _TILES * MOST_VECTORS * SCORES + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


@jit
def _sequence_of(job: Any, chunk: int) -> Any:
    """Return the words of the sequence to which a chunk belongs."""
    of = job[SEQUENCES]
    for i in range(1, job[N_SEQUENCES]):
        if words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)[SEQ_CHUNK] <= chunk:
            of = job[SEQUENCES] + 8 * SEQ_WIDTH * i
    return words(of)


# ---- decode: a chunk is one block of keys ----


@task
def attend_decode(job: Any, chunk: int, scratch: int) -> None:
    """Compute attention of the queries of one sequence and one KV head over one block of keys.

    OUT has rows of E + 16 floats, as `found` in `attend_block`. A sequence's rows (query tokens, H, blocks) begin at
    row `sequence[SEQ_PART]`.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_tokens, n_blocks = job[E], job[H] // job[G], sequence[job[COLUMN]], sequence[SEQ_BLOCKS]
    head, block = (chunk - sequence[SEQ_CHUNK]) // n_blocks, (chunk - sequence[SEQ_CHUNK]) % n_blocks
    rows, row, position = group * n_tokens, width + LANES, sequence[SEQ_LENGTH] - n_tokens
    # Scratch memory: queries, then the results and scores of `_TILES` tiles, then _PIECE expanded rows.
    queries, found = floats(scratch), floats(scratch + 4 * rows * width)
    scores_at = scratch + 4 * (rows * width + _TILES * MOST_VECTORS * row)
    scores, number_of = floats(scores_at), sequence[SEQ_BEGIN] + block
    memory = _memory_after(scores_at)
    out = floats(job[OUT] + 4 * sequence[SEQ_PART] * row)
    _copy_queries(job, head, sequence[SEQ_ROW], n_tokens, queries)
    tiles = ceil_div(rows, tile_vectors())
    for tile in range(0, tiles, _TILES):
        first, last = tile * rows // tiles, min(tile + _TILES, tiles) * rows // tiles
        seen = attend_block(
            job, sequence, head, number_of, queries, first, last - first, n_tokens, position, found, scores, 0, memory,
        )  # fmt: skip
        for r in range(first, last):
            to = ((r % n_tokens * job[H] + head * group + r // n_tokens) * n_blocks + block) * row
            for e in range(0, row, LANES):
                store(out, to + e, load(found, (r - first) * row + e) if seen else zeros())
            if not seen:
                put(out, to + width, LEAST)


# ---- prefill: a chunk is a span of the queries of one sequence ----


@task
def attend_prefill(job: Any, chunk: int, scratch: int) -> None:
    """Compute attention of the queries of one KV head and one span of tokens, over all blocks of visible keys.

    The chunks of one head are consecutive, so that its keys stay in the cache. The last span of tokens, which has the
    most keys, is the head's first chunk: threads wait for each other at the end of a job, so the last chunks should be
    short.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_queries = job[E], job[H] // job[G], sequence[job[COLUMN]]
    n_spans, own = ceil_div(n_queries, job[SPAN]), chunk - sequence[SEQ_CHUNK]
    head, t = own // n_spans, (n_spans - 1 - own % n_spans) * job[SPAN]
    n_tokens, position = min(job[SPAN], n_queries - t), sequence[SEQ_LENGTH] - n_queries + t
    rows, row = group * n_tokens, width + LANES
    # Scratch memory: queries, their running results, the results and scores of `_TILES` tiles for one block, and the
    # expanded keys and values of a block.
    queries, sums = floats(scratch), floats(scratch + 4 * rows * width)
    found = floats(scratch + 4 * rows * (width + row))
    scores_at, out = scratch + 4 * (rows * (width + row) + _TILES * MOST_VECTORS * row), floats(job[OUT])
    scores, memory = floats(scores_at), _memory_after(scores_at)
    _copy_queries(job, head, sequence[SEQ_ROW] + t, n_tokens, queries)
    for r in range(rows):
        for e in range(0, row, LANES):
            store(sums, r * row + e, zeros())
        put(sums, r * row + width, LEAST)
    tiles, block = ceil_div(rows, tile_vectors()), first_visible(job, position) // BLOCK
    while block * BLOCK < position + n_tokens:
        expanded = _expand(job, sequence, head, block, position, n_tokens, memory)
        for tile in range(0, tiles, _TILES):
            first, last = tile * rows // tiles, min(tile + _TILES, tiles) * rows // tiles
            if attend_block(
                job, sequence, head, block, queries, first, last - first, n_tokens, position, found, scores, expanded,
                memory,
            ):  # fmt: skip
                for r in range(first, last):
                    join(sums, r * row, found, (r - first) * row, width)
        block += 1
    for r in range(rows):
        own_head = head * group + r // n_tokens
        to = (sequence[SEQ_ROW] + t + r % n_tokens) * job[H] + own_head
        finish(job, own_head, sums, r * row, width, out, to * width)


# ---- the job ----


@jit
def _number_chunks(job: Any, is_decode: bool) -> Any:
    """Write the words SEQ_ROW to SEQ_BLOCKS of each sequence; return the number of chunks."""
    row, chunk, part = 0, 0, 0
    for i in range(job[N_SEQUENCES]):
        sequence = words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)
        n = sequence[job[COLUMN]]
        begin = first_visible(job, sequence[SEQ_LENGTH] - n) // BLOCK
        n_blocks = ceil_div(sequence[SEQ_LENGTH], BLOCK) - begin
        sequence[SEQ_ROW], sequence[SEQ_CHUNK], sequence[SEQ_PART] = row, chunk, part
        sequence[SEQ_BEGIN], sequence[SEQ_BLOCKS] = begin, n_blocks
        row, part = row + n, part + n * job[H] * n_blocks
        if n > 0:
            chunk += job[G] * (n_blocks if is_decode else ceil_div(n, job[SPAN]))
    return chunk


@jit
def _join_blocks(job: Any, n_sequences: int, parts: Any, out: Any) -> None:
    """Join the results of the blocks of each query, in the order of blocks, and write the outputs to `out`."""
    width, row, to = job[E], job[E] + LANES, 0
    for i in range(n_sequences):
        sequence = words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)
        n_blocks = sequence[SEQ_BLOCKS]
        for r in range(sequence[job[COLUMN]] * job[H]):
            at = sequence[SEQ_PART] + r * n_blocks
            for block in range(1, n_blocks):
                join(parts, at * row, parts, (at + block) * row, width)
            finish(job, r % job[H], parts, at * row, width, out, to * width)
            to += 1


@entry
def attend(
    address: int, decode: int, prefill: int, q: int, n_rows: int, n_heads: int, n_kv_heads: int, width: int, store: int,
    kind: int, slots: int, arrays: int, page: int, window: int, sequences: int, n_sequences: int, column: int,
    scale: float, softcap: float, sinks: int, parts: int, out: int,
) -> None:  # fmt: skip
    """Compute attention (R, H, E) of queries over the pages of a KV store.

    Args:
        address: address of the thread pool's control block.
        decode: address of the task `attend_decode`.
        prefill: address of the task `attend_prefill`.
        q: address of (R, H, E): the queries of each sequence's last tokens, end to end.
        n_rows: R, the number of query tokens.
        n_heads: H.
        n_kv_heads: G.
        width: E, a multiple of 16, and of 32 if the store is Q8_0.
        store: address of the store, (`arrays`, G, slots, E).
        kind: the type of the store, one of `KV_TYPES`.
        slots: slots per head of the store.
        arrays: 2, for keys and values; 1 if the keys are also the values.
        page: tokens per page.
        window: number of latest tokens that a token attends to; 0 means all. If the number is -C, the sequence is cut
            into ranges of C tokens from position 0 on, and a token attends only to its own range.
        sequences: address of the words of each sequence (`layout.py`).
        n_sequences: B.
        column: SEQ_NEW or SEQ_WANTED: the word of a sequence that has the number of its query tokens.
        scale: factor of the scores.
        softcap: the scores become `softcap * tanh(score / softcap)`; 0 means no soft cap.
        sinks: address of the sinks (H,); 0 means none.
        parts: address of memory for the results of decode. A query token needs `H * (E + 16)` floats for each block of
            keys to which a query of its sequence attends.
        out: address of (R, H, E).
    """
    job = words(address)[JOB:]
    job[Q], job[STORE], job[OUT], job[H], job[G], job[E] = q, store, out, n_heads, n_kv_heads, width
    job[TYPE], job[SLOTS], job[PAGE], job[WINDOW], job[SINKS] = kind, slots, page, window, sinks
    job[ARRAYS] = arrays
    job[SCALE] = word((scale if softcap == 0 else softcap) / math.log(2))
    job[INNER_SCALE] = word(0.0 if softcap == 0 else scale / softcap)
    job[SEQUENCES], job[N_SEQUENCES], job[COLUMN] = sequences, n_sequences, column
    job[SPAN] = _span(n_heads // n_kv_heads)
    if n_rows > SMALL_BATCH:
        run(words(address), prefill, _number_chunks(job, False))
        return
    job[OUT] = parts
    run(words(address), decode, _number_chunks(job, True))
    _join_blocks(job, n_sequences, floats(parts), floats(out))
