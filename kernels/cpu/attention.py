"""Softmax attention over pages of keys and values, without masks, copies or repeated heads.

A store is (2, G, slots, E): keys, then values, each contiguous per head. A page is a run of slots; a sequence has a
table of pages. The queries of a forward pass are the last tokens of each of its sequences. The order of summation does
not depend on how many queries or sequences there are, on pages, nor on which keys are new in a pass:

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
from kernels.cpu.layout import (
    BLOCK,
    FEW,
    JOB,
    LANES,
    LINE_BYTES,
    QUERIES,
    SCORES,
    SEQ_BEGIN,
    SEQ_BLOCKS,
    SEQ_CHUNK,
    SEQ_LENGTH,
    SEQ_PAGES,
    SEQ_PART,
    SEQ_ROW,
    SEQ_WIDTH,
    TILE_ROWS,
)
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

# Words of a job. Q is (R, H, E), OUT as well; SLOTS is the store's, PAGE the tokens of a page. Word COLUMN of a
# sequence says how many queries it has. A chunk for many queries has SPAN of them.
Q, STORE, OUT, H, KV, E, SLOTS, PAGE, WINDOW, SCALE, SEQUENCES, N_SEQUENCES, COLUMN, SPAN = range(14)

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
    job: Any, sequence: Any, head: int, block: int, queries: Any, first_row: int, n: int, n_tokens: int, position: int,
    found: Any, scores: Any,
) -> bool:  # fmt: skip
    """Attention of at most `tile_vectors()` queries over one block of keys, to the rows of `found`.

    Args:
        job: the words named above.
        sequence: the words of the queries' sequence.
        head: of the keys and values.
        block: counted from position 0.
        queries: (rows, E); row r is that of token `r % n_tokens`, for one of the heads that share keys.
        first_row: the first query's row.
        n: how many queries there are; their rows follow each other.
        n_tokens: T of the chunk.
        position: that of the first token. A token sees the positions up to its own.
        found: (n, E + 16): E weighted sums, then the largest score and the sum of the weights.
        scores: room for (n, SCORES).

    Returns:
        Whether any of them sees a key of the block.
    """
    width, start = job[E], block * BLOCK
    first, last, row = BLOCK, 0, width + LANES
    for r in range(first_row, first_row + n):
        begin, end = _visible(job, position + r % n_tokens, start)
        if begin < end:
            first, last = min(first, begin), max(last, end)
    if first >= last:
        return False
    pages, by_value = words(sequence[SEQ_PAGES]), 4 * job[KV] * job[SLOTS] * width
    far, j = sequence[job[COLUMN]] <= FEW, first
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last)
        _scores(keys, j, stop, queries, first_row * width, n, width, scores, keys + by_value, far)
        j = stop
    scale = np.float32(number(job[SCALE]))
    for i in range(n):
        begin, end = _visible(job, position + (first_row + i) % n_tokens, start)
        largest, sum_ = _weights(scores, i * SCORES, first, last, begin, end, scale)
        put(found, i * row + width, largest)
        put(found, i * row + width + 1, sum_)
    j = first
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last)
        values = floats(keys + by_value)
        sum_weighted(scores, j, SCORES, n, values, j * width, width, stop - j, width, found, 0, row, j - first)
        j = stop
    return True


@jit
def _key_run(job: Any, pages: Any, head: int, start: int, j: int, last: int) -> Any:
    """Return a run of a head's keys, from key j of the block at position `start` on, below key `last`.

    Returns:
        The address of key 0 of the block, if the run began there; and the key behind the run.
    """
    size = job[PAGE]
    page = (start + j) // size
    slot, stop = pages[page] + start + j - page * size, (page + 1) * size - start
    # Pages often follow each other.
    while stop < last and pages[page + 1] == pages[page] + size:
        page, stop = page + 1, stop + size
    return job[STORE] + 4 * (head * job[SLOTS] + slot - j) * job[E], min(stop, last)


@jit
def _first_visible(job: Any, position: int) -> Any:
    """Return the first position that the token at a position sees."""
    return 0 if job[WINDOW] == 0 else max(0, position + 1 - job[WINDOW])


@jit
def _visible(job: Any, position: int, start: int) -> Any:
    """Return which keys of the block at position `start` the token at a position sees: the first, and the end."""
    return max(0, _first_visible(job, position) - start), min(BLOCK, position + 1 - start)


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
def _copy_queries(job: Any, head: int, first: int, n_tokens: int, queries: Any) -> None:
    """The queries of the heads that share keys, (group, n_tokens, E), of rows from `first` on."""
    width, group = job[E], job[H] // job[KV]
    for g in range(group):
        for i in range(n_tokens):
            q, to = floats(job[Q] + 4 * ((first + i) * job[H] + head * group + g) * width), (g * n_tokens + i) * width
            for e in range(0, width, LANES):
                store(queries, to + e, load(q, e))


@jit
def _sequence_of(job: Any, chunk: int) -> Any:
    """Return the words of the sequence that a chunk is for: the last one whose first chunk is not behind it."""
    of = job[SEQUENCES]
    for i in range(1, job[N_SEQUENCES]):
        if words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)[SEQ_CHUNK] <= chunk:
            of = job[SEQUENCES] + 8 * SEQ_WIDTH * i
    return words(of)


# ---- few queries: a chunk is a block ----


@task
def attend_few(job: Any, chunk: int, scratch: int) -> None:
    """All queries of a sequence and the heads that share keys, over one block.

    OUT holds what the blocks of each sequence find, (queries, H, blocks, E + 16) from SEQ_PART on.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_tokens, n_blocks = job[E], job[H] // job[KV], sequence[job[COLUMN]], sequence[SEQ_BLOCKS]
    head, block = (chunk - sequence[SEQ_CHUNK]) // n_blocks, (chunk - sequence[SEQ_CHUNK]) % n_blocks
    rows, row, position = group * n_tokens, width + LANES, sequence[SEQ_LENGTH] - n_tokens
    # Scratch memory: queries, then what is found for a tile of them, then their scores.
    queries, found = floats(scratch), floats(scratch + 4 * rows * width)
    scores = floats(scratch + 4 * (rows * width + MOST_VECTORS * row))
    out = floats(job[OUT] + 4 * sequence[SEQ_PART] * row)
    _copy_queries(job, head, sequence[SEQ_ROW], n_tokens, queries)
    tiles = ceil_div(rows, tile_vectors())
    for tile in range(tiles):
        first, last = tile * rows // tiles, (tile + 1) * rows // tiles
        seen = _attend_block(
            job, sequence, head, sequence[SEQ_BEGIN] + block, queries, first, last - first, n_tokens, position, found,
            scores,
        )  # fmt: skip
        for r in range(first, last):
            to = ((r % n_tokens * job[H] + head * group + r // n_tokens) * n_blocks + block) * row
            for e in range(0, row, LANES):
                store(out, to + e, load(found, (r - first) * row + e) if seen else zeros())
            if not seen:
                put(out, to + width, _LEAST)


# ---- many queries: a chunk is a span of one sequence's ----


@task
def attend_many(job: Any, chunk: int, scratch: int) -> None:
    """The queries of one key/value head and one span of tokens, the last span first: it sees most.

    Spans of one head follow each other, so that its keys stay near, and every thread ends with a short one.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_queries = job[E], job[H] // job[KV], sequence[job[COLUMN]]
    n_spans, own = ceil_div(n_queries, job[SPAN]), chunk - sequence[SEQ_CHUNK]
    head, t = own // n_spans, (n_spans - 1 - own % n_spans) * job[SPAN]
    n_tokens, position = min(job[SPAN], n_queries - t), sequence[SEQ_LENGTH] - n_queries + t
    rows, row = group * n_tokens, width + LANES
    # Scratch memory: queries, what there is for each of them, then what is found for a tile of them, and their scores.
    queries, sums = floats(scratch), floats(scratch + 4 * rows * width)
    found = floats(scratch + 4 * rows * (width + row))
    scores, out = floats(scratch + 4 * (rows * (width + row) + MOST_VECTORS * row)), floats(job[OUT])
    _copy_queries(job, head, sequence[SEQ_ROW] + t, n_tokens, queries)
    for r in range(rows):
        for e in range(0, row, LANES):
            store(sums, r * row + e, zeros())
        put(sums, r * row + width, _LEAST)
    tiles, block = ceil_div(rows, tile_vectors()), _first_visible(job, position) // BLOCK
    while block * BLOCK < position + n_tokens:
        for tile in range(tiles):
            first, last = tile * rows // tiles, (tile + 1) * rows // tiles
            if _attend_block(
                job, sequence, head, block, queries, first, last - first, n_tokens, position, found, scores
            ):
                for r in range(first, last):
                    _join(sums, r * row, found, (r - first) * row, width)
        block += 1
    for r in range(rows):
        to = (sequence[SEQ_ROW] + t + r % n_tokens) * job[H] + head * group + r // n_tokens
        _finish(sums, r * row, width, out, to * width)


# ---- a job ----


@jit
def _deal(job: Any, is_few: bool) -> Any:
    """Write which chunks each sequence has; return how many there are."""
    row, chunk, part = 0, 0, 0
    for i in range(job[N_SEQUENCES]):
        sequence = words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)
        n = sequence[job[COLUMN]]
        begin = _first_visible(job, sequence[SEQ_LENGTH] - n) // BLOCK
        n_blocks = ceil_div(sequence[SEQ_LENGTH], BLOCK) - begin
        sequence[SEQ_ROW], sequence[SEQ_CHUNK], sequence[SEQ_PART] = row, chunk, part
        sequence[SEQ_BEGIN], sequence[SEQ_BLOCKS] = begin, n_blocks
        row, part = row + n, part + n * job[H] * n_blocks
        if n > 0:
            chunk += job[KV] * (n_blocks if is_few else ceil_div(n, job[SPAN]))
    return chunk


@jit
def _join_blocks(job: Any, n_sequences: int, parts: Any, out: Any) -> None:
    """Join what the blocks of each query have found, in their order."""
    width, row, to = job[E], job[E] + LANES, 0
    for i in range(n_sequences):
        sequence = words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)
        n_blocks = sequence[SEQ_BLOCKS]
        for r in range(sequence[job[COLUMN]] * job[H]):
            at = sequence[SEQ_PART] + r * n_blocks
            for block in range(1, n_blocks):
                _join(parts, at * row, parts, (at + block) * row, width)
            _finish(parts, at * row, width, out, to * width)
            to += 1


@entry
def attend(
    address: int, few: int, many: int, q: int, n_rows: int, n_heads: int, n_kv_heads: int, width: int, store: int,
    slots: int, page: int, window: int, sequences: int, n_sequences: int, column: int, scale: float, parts: int,
    out: int,
) -> None:  # fmt: skip
    """(R, H, E) attention of queries over pages of a store.

    Args:
        address: of the pool's control block.
        few: address of `attend_few`.
        many: address of `attend_many`.
        q: address of (R, H, E): the last queries of each sequence, end to end.
        n_rows: R.
        n_heads: H.
        n_kv_heads: G.
        width: E, a multiple of 16; `layout.attention_scratch` says what it may be at most.
        store: address of (2, G, slots, E).
        slots: of the store.
        page: tokens of a page.
        window: how many of the latest tokens a token sees; 0 is all.
        sequences: address of the words of each sequence (`layout.py`).
        n_sequences: B.
        column: which word of a sequence is its number of queries.
        scale: of the scores.
        parts: address of room for H (E + 16) floats for each query and block that has visible keys; for up to `FEW`
            queries in all.
        out: address of (R, H, E).
    """
    job = words(address)[JOB:]
    job[Q], job[STORE], job[OUT], job[H], job[KV], job[E] = q, store, out, n_heads, n_kv_heads, width
    job[SLOTS], job[PAGE], job[WINDOW], job[SCALE] = slots, page, window, word(scale / math.log(2))
    job[SEQUENCES], job[N_SEQUENCES], job[COLUMN] = sequences, n_sequences, column
    job[SPAN] = max(1, QUERIES * n_kv_heads // (n_heads * LANES)) * LANES
    if n_rows > FEW:
        run(words(address), many, _deal(job, False))
        return
    job[OUT] = parts
    run(words(address), few, _deal(job, True))
    _join_blocks(job, n_sequences, floats(parts), floats(out))
