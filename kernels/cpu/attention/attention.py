"""Softmax attention over pages of keys and values: jobs that distribute blocks of keys or spans of queries to threads.

A store is (2, G, slots, E): keys, then values, each contiguous per head. A page is a run of slots, and each sequence
has a page table. The queries of a sequence are those of its last tokens. There are no masks, no copies of keys or
values, and no repeated heads. `attention_block.py` defines the arithmetic and its order; both tasks give the same bits:

- decode (up to SMALL_BATCH queries): a chunk is one block of keys, so that several threads share a long sequence;
- prefill (more queries): a chunk is a span of the queries of one sequence over all its blocks.

The NumPy twin is in `attention_numpy.py`.
"""

from __future__ import annotations

import math
from typing import Any

from ..build.jit import entry, jit, task
from ..build.jobs import run
from ..build.layout import (
    BLOCK,
    JOB,
    LANES,
    QUERIES,
    SEQ_BEGIN,
    SEQ_BLOCKS,
    SEQ_CHUNK,
    SEQ_LENGTH,
    SEQ_PART,
    SEQ_ROW,
    SEQ_WIDTH,
    SMALL_BATCH,
)
from ..build.memory import floats, word, words
from ..build.vectors import load, put, store, zeros
from ..products.linear_job import ceil_div
from ..products.tile import MOST_VECTORS, tile_vectors
from .attention_block import (
    COLUMN,
    INNER_SCALE,
    LEAST,
    N_SEQUENCES,
    OUT,
    PAGE,
    SCALE,
    SEQUENCES,
    SINKS,
    SLOTS,
    SPAN,
    STORE,
    WINDOW,
    E,
    G,
    H,
    Q,
    attend_block,
    finish,
    first_visible,
    join,
)


@jit
def _copy_queries(job: Any, head: int, first: int, n_tokens: int, queries: Any) -> None:
    """Copy the queries of the heads that share a KV head to (group, n_tokens, E), from row `first` of Q on."""
    width, group = job[E], job[H] // job[G]
    for g in range(group):
        for i in range(n_tokens):
            q, to = floats(job[Q] + 4 * ((first + i) * job[H] + head * group + g) * width), (g * n_tokens + i) * width
            for e in range(0, width, LANES):
                store(queries, to + e, load(q, e))


@jit
def _sequence_of(job: Any, chunk: int) -> Any:
    """Return the words of the sequence of a chunk: the last sequence whose first chunk is not after this chunk."""
    of = job[SEQUENCES]
    for i in range(1, job[N_SEQUENCES]):
        if words(job[SEQUENCES] + 8 * SEQ_WIDTH * i)[SEQ_CHUNK] <= chunk:
            of = job[SEQUENCES] + 8 * SEQ_WIDTH * i
    return words(of)


# ---- decode: a chunk is one block of keys ----


@task
def attend_decode(job: Any, chunk: int, scratch: int) -> None:
    """Compute attention over one block of keys, for all queries of a sequence and of the heads that share a KV head.

    OUT gets the results of the blocks of each sequence, (queries, H, blocks, E + 16) from row SEQ_PART on.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_tokens, n_blocks = job[E], job[H] // job[G], sequence[job[COLUMN]], sequence[SEQ_BLOCKS]
    head, block = (chunk - sequence[SEQ_CHUNK]) // n_blocks, (chunk - sequence[SEQ_CHUNK]) % n_blocks
    rows, row, position = group * n_tokens, width + LANES, sequence[SEQ_LENGTH] - n_tokens
    # Scratch memory: queries, then the results and the scores of one tile of them.
    queries, found = floats(scratch), floats(scratch + 4 * rows * width)
    scores = floats(scratch + 4 * (rows * width + MOST_VECTORS * row))
    out = floats(job[OUT] + 4 * sequence[SEQ_PART] * row)
    _copy_queries(job, head, sequence[SEQ_ROW], n_tokens, queries)
    tiles = ceil_div(rows, tile_vectors())
    for tile in range(tiles):
        first, last = tile * rows // tiles, (tile + 1) * rows // tiles
        seen = attend_block(
            job, sequence, head, sequence[SEQ_BEGIN] + block, queries, first, last - first, n_tokens, position, found,
            scores,
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
    """Compute attention of the queries of one KV head and one span of tokens, over all their blocks of keys.

    Chunks of one head are consecutive, so that its keys stay in the cache. The last span comes first: it has the most
    keys, so that the last chunks, which threads wait for, are short.
    """
    sequence = _sequence_of(job, chunk)
    width, group, n_queries = job[E], job[H] // job[G], sequence[job[COLUMN]]
    n_spans, own = ceil_div(n_queries, job[SPAN]), chunk - sequence[SEQ_CHUNK]
    head, t = own // n_spans, (n_spans - 1 - own % n_spans) * job[SPAN]
    n_tokens, position = min(job[SPAN], n_queries - t), sequence[SEQ_LENGTH] - n_queries + t
    rows, row = group * n_tokens, width + LANES
    # Scratch memory: queries, their running results, then the results of one block and the scores of one tile of them.
    queries, sums = floats(scratch), floats(scratch + 4 * rows * width)
    found = floats(scratch + 4 * rows * (width + row))
    scores, out = floats(scratch + 4 * (rows * (width + row) + MOST_VECTORS * row)), floats(job[OUT])
    _copy_queries(job, head, sequence[SEQ_ROW] + t, n_tokens, queries)
    for r in range(rows):
        for e in range(0, row, LANES):
            store(sums, r * row + e, zeros())
        put(sums, r * row + width, LEAST)
    tiles, block = ceil_div(rows, tile_vectors()), first_visible(job, position) // BLOCK
    while block * BLOCK < position + n_tokens:
        for tile in range(tiles):
            first, last = tile * rows // tiles, (tile + 1) * rows // tiles
            if attend_block(
                job, sequence, head, block, queries, first, last - first, n_tokens, position, found, scores
            ):
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
    """Write the first chunk, row, block and result of each sequence; return the number of chunks."""
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
    """Join the results of the blocks of each query, in the order of blocks."""
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
    slots: int, page: int, window: int, sequences: int, n_sequences: int, column: int, scale: float, softcap: float,
    sinks: int, parts: int, out: int,
) -> None:  # fmt: skip
    """Compute (R, H, E) attention of queries over pages of a store.

    Args:
        address: address of the pool's control block.
        decode: address of the task `attend_decode`.
        prefill: address of the task `attend_prefill`.
        q: address of (R, H, E): the last queries of each sequence, end to end.
        n_rows: R.
        n_heads: H.
        n_kv_heads: G.
        width: E, a multiple of 16. `layout.attention_scratch` gives the scratch memory that it needs.
        store: address of (2, G, slots, E).
        slots: slots per head of the store.
        page: tokens per page.
        window: number of latest tokens that a token attends to; 0 is all.
        sequences: address of the words of each sequence (`layout.py`).
        n_sequences: B.
        column: the word of a sequence that holds its number of queries.
        scale: factor of the scores.
        softcap: the scores become `softcap * tanh(score / softcap)`; 0 is no soft cap.
        sinks: address of (H,), one more logit for each query head, without a value; 0 is none.
        parts: address of memory for the results of blocks: H (E + 16) floats for each query and block that has visible
            keys. Used for up to `SMALL_BATCH` queries in all.
        out: address of (R, H, E).
    """
    job = words(address)[JOB:]
    job[Q], job[STORE], job[OUT], job[H], job[G], job[E] = q, store, out, n_heads, n_kv_heads, width
    job[SLOTS], job[PAGE], job[WINDOW], job[SINKS] = slots, page, window, sinks
    # The outer factor has log2(e), for powers of 2.
    job[SCALE] = word((scale if softcap == 0 else softcap) / math.log(2))
    job[INNER_SCALE] = word(0.0 if softcap == 0 else scale / softcap)
    job[SEQUENCES], job[N_SEQUENCES], job[COLUMN] = sequences, n_sequences, column
    job[SPAN] = max(1, QUERIES * n_kv_heads // (n_heads * LANES)) * LANES
    if n_rows > SMALL_BATCH:
        run(words(address), prefill, _number_chunks(job, False))
        return
    job[OUT] = parts
    run(words(address), decode, _number_chunks(job, True))
    _join_blocks(job, n_sequences, floats(parts), floats(out))
