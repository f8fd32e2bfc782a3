"""Attention over one block of keys: scores, weights, the weighted sum of values, and how results of blocks are joined.

The order of summation depends neither on how many queries or sequences a pass has, nor on pages, nor on which keys are
new in the pass:

    Keys are cut into blocks of BLOCK keys, counted from position 0. A score is a dot product in the order of `tile.py`,
    times the scale; with a soft cap it is the cap times the tanh of the score over the cap. The weight of a key is 2 to
    the power of its score minus the largest score of the block. The weights of a block are added in 16 sums: sum l adds
    the weights of keys l, l + 16, ... of the block, and halves of the 16 sums are then added to halves. Values are
    added in the order of keys, from zero, by `sum = fma(weight, value, sum)`. Blocks are joined in their order: the
    running sums and the block's sums are both scaled by powers of 2 to the larger of their two largest scores, by
    `sum = fma(new, its scale, sum * its scale)`. A sink is joined after the last block, as a key whose value is 0.

A masked key has weight 0, which changes no bit, so masked keys at the ends of a block are skipped. The running sum is
rescaled as in Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018) and Dao et al.
("FlashAttention", 2022). Powers of 2 are cheaper than powers of e; the caller multiplies the scale by log2(e).
`attention.py` distributes blocks and queries over threads. The order in NumPy is `order_numpy.attend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.exponentials import exp2_below, tanh
from ..build.jit import jit
from ..build.layout import BLOCK, LANES, LINE_BYTES, SCORES, SEQ_PAGES, SMALL_BATCH, TILE_ROWS
from ..build.memory import floats, number, raw, words
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
from ..products.tile import set_dots, sum_weighted

# Words of an attention job. Q and OUT are the addresses of (R, H, E) arrays; in decode OUT is that of the results of
# blocks. STORE is the address of the KV store, (2, G, slots, E), of SLOTS slots per head; PAGE is the number of tokens
# of a page. COLUMN is the word of a sequence that holds its number of queries. SPAN is the number of tokens of a chunk
# in prefill. SCALE is the factor of the scores, or with a soft cap the cap, and INNER_SCALE the factor of the argument
# of tanh, or 0; both are bits of float64. SINKS is the address of the sinks (H,), or 0.
(
    Q, STORE, OUT, H, G, E, SLOTS, PAGE, WINDOW, SCALE, SEQUENCES, N_SEQUENCES, COLUMN, SPAN, INNER_SCALE, SINKS,
) = range(16)  # fmt: skip

# The largest score of no keys.
LEAST = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
# Prefetch distance in bytes, along the keys.
_AHEAD = 2048


@jit
def _scores(
    keys: int, first: int, last: int, q: Any, at: int, n: int, width: int, scores: Any, values: int, far: bool
) -> None:
    """`scores[i SCORES + j] = key j . query i` for keys first to last - 1. Up to three more scores may be written.

    In decode (`far`) each key and value is read once, from memory. The keys at address `keys` are prefetched some bytes
    ahead, and with them the values at address `values`, which are needed next: two streams are read at once.
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
        # Fewer than four keys are left, and pages may end here: a row distance of 0 gives the tile one key four times.
        set_dots(data, j * width, 0, q, at, width, n, width, scores, j, SCORES)
        j += 1


@jit
def _squash(scores: Any, at: int, first: int, last: int, scale: Any) -> None:
    """Replace the scores of a query for keys first to last - 1 by `tanh(scale * score)`."""
    factor = splat(scale)
    for j in range(first - first % LANES, last, LANES):
        store(scores, at + j, tanh(mul(load(scores, at + j), factor)))


@jit
def _weights(scores: Any, at: int, first: int, last: int, begin: int, end: int, scale: Any) -> Any:
    """Replace the scores of a query by weights; keys first to last - 1 outside [begin, end) get weight 0.

    Returns:
        The largest scaled score, and the sum of the weights.
    """
    largest, least, factor = splat(LEAST), splat(LEAST), splat(scale)
    first -= first % LANES
    for j in range(first, last, LANES):
        scaled = between(begin - j, end - j, mul(load(scores, at + j), factor), least)
        store(scores, at + j, scaled)
        largest = larger(scaled, largest)
    found = largest_lane(largest)
    # Without a visible key `found` is -inf, and -inf - -inf is NaN.
    base, sums = splat(max(found, np.float32(-3e38))), zeros()
    for j in range(first, last, LANES):
        weight = exp2_below(sub(load(scores, at + j), base))
        store(scores, at + j, weight)
        sums = add(sums, weight)
    return found, total(sums)


@jit
def attend_block(
    job: Any, sequence: Any, head: int, block: int, queries: Any, first_row: int, n: int, n_tokens: int, position: int,
    found: Any, scores: Any,
) -> bool:  # fmt: skip
    """Compute attention of at most `tile_vectors()` queries over one block of keys; write the results to `found`.

    Args:
        job: words of the job, named above.
        sequence: words of the queries' sequence.
        head: the KV head.
        block: number of the block, counted from position 0.
        queries: (rows, E); row r is a query of token `r % n_tokens`, for one of the query heads that share the KV head.
        first_row: row of the first query.
        n: number of queries, in consecutive rows.
        n_tokens: tokens of the chunk.
        position: position of the first token. A token attends to positions up to its own.
        found: (n, E + 16): E weighted sums, then the largest score and the sum of the weights.
        scores: scratch memory for (n, SCORES) floats.

    Returns:
        Whether any of the queries attends to a key of the block.
    """
    width, start = job[E], block * BLOCK
    first, last, row = BLOCK, 0, width + LANES
    for r in range(first_row, first_row + n):
        begin, end = _visible(job, position + r % n_tokens, start)
        if begin < end:
            first, last = min(first, begin), max(last, end)
    if first >= last:
        return False
    pages, by_value = words(sequence[SEQ_PAGES]), 4 * job[G] * job[SLOTS] * width
    far, j = sequence[job[COLUMN]] <= SMALL_BATCH, first
    while j < last:
        keys, stop = _key_run(job, pages, head, start, j, last)
        _scores(keys, j, stop, queries, first_row * width, n, width, scores, keys + by_value, far)
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
        keys, stop = _key_run(job, pages, head, start, j, last)
        values = floats(keys + by_value)
        sum_weighted(scores, j, SCORES, n, values, j * width, width, stop - j, width, found, 0, row, j - first)
        j = stop
    return True


@jit
def _key_run(job: Any, pages: Any, head: int, start: int, j: int, last: int) -> Any:
    """Find the longest run of contiguous keys of a head that begins at key j of a block and ends before key `last`.

    The block begins at position `start`.

    Returns:
        The address that key 0 of the block would have if the run reached back to it, and the key after the run.
    """
    size = job[PAGE]
    page = (start + j) // size
    slot, stop = pages[page] + start + j - page * size, (page + 1) * size - start
    # Consecutive pages are often adjacent in memory: one longer run makes fewer calls.
    while stop < last and pages[page + 1] == pages[page] + size:
        page, stop = page + 1, stop + size
    return job[STORE] + 4 * (head * job[SLOTS] + slot - j) * job[E], min(stop, last)


@jit
def first_visible(job: Any, position: int) -> Any:
    """Return the first position that the token at a position attends to."""
    return 0 if job[WINDOW] == 0 else max(0, position + 1 - job[WINDOW])


@jit
def _visible(job: Any, position: int, start: int) -> Any:
    """Return the range [begin, end) of keys of the block at position `start` that a token attends to."""
    return max(0, first_visible(job, position) - start), min(BLOCK, position + 1 - start)


@jit
def join(sums: Any, to: int, found: Any, at: int, width: int) -> None:
    """Join the result of a block, `found[at ...]`, to the running result, `sums[to ...]`: rows of `attend_block`."""
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
    """Join a sink, times log2(e), to the running result: a key with this score and weight 1, whose value is 0."""
    before = get(sums, at + width)
    largest = max(before, sink)
    old_scale, new_scale = exp2_below(splat(before - largest)), exp2_below(splat(sink - largest))
    for e in range(0, width, LANES):
        store(sums, at + e, mul(load(sums, at + e), old_scale))
    store(sums, at + width, add(new_scale, mul(splat(get(sums, at + width + 1)), old_scale)))
    put(sums, at + width + 1, get(sums, at + width))


@jit
def finish(job: Any, head: int, sums: Any, at: int, width: int, out: Any, to: int) -> None:
    """Divide the weighted sums of a query of this head by the sum of the weights: `out[to ...]`, E elements."""
    if job[SINKS] != 0:
        _join_sink(sums, at, width, get(floats(job[SINKS]), head) * LOG2_E)
    divisor = splat(get(sums, at + width + 1))
    for e in range(0, width, LANES):
        store(out, to + e, div(load(sums, at + e), divisor))
