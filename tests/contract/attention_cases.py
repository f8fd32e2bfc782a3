"""Cases of attention, positions, storage of keys and values, and changes of shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.parameters import Growth, RMSNorm, Rope, Scores
from tests.contract.case import OpCase, Run, norm_weight, normal, weight


def rope(positions: Sequence[int], heads: int, head_dim: int, theta: float = 1e4) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.heads(be.array(normal(rng, len(positions), heads * head_dim)), head_dim)
        return be.rope(x, Rope.plain(head_dim, theta), positions)

    return run


# Three rotated pairs of eight, longer than they were; queries grow every 16 tokens.
SCALED = Rope((1.0, 0.5, 0.1, *(0.0,) * 5), (1.2, 1.2, 1.2, *(1.0,) * 5), Growth(0.3, 16))


def scaled_rope(positions: Sequence[int]) -> Run:
    return lambda be, rng: be.rope(be.array(normal(rng, len(positions), 2, 16)), SCALED, positions)


def head_norm_rope(positions: Sequence[int], *, normed: bool, rope: Rope | None = None) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        q, k, v = (be.array(normal(rng, len(positions), n)) for n in (64, 32, 32))
        norms = (
            (RMSNorm("q", norm_weight(be, rng, 16), 1e-6), RMSNorm("k", norm_weight(be, rng, 16), 1e-6))
            if normed
            else None
        )
        return be.head_norm_rope(q, k, v, 16, norms, rope or Rope.plain(16, 1e4), positions)

    return run


def norm_rope(positions: Sequence[int], rope: Rope | None) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, len(positions), 48))
        return be.norm_rope(x, 16, RMSNorm("q", norm_weight(be, rng, 16), 1e-6), rope, positions)

    return run


def attention(t: int, past: int, heads: int, kv_heads: int, head_dim: int = 16, **options: Any) -> Run:
    """Attend with t queries, the last t of `past` + t cached tokens."""
    return attention_of_batch([(past, t, t)], heads, kv_heads, head_dim, **options)


def attention_of_batch(
    sequences: list[tuple[int, int, int]], heads: int, kv_heads: int, head_dim: int = 16, *,
    window: int | None = None, scale: float = 1.0, page: int = 4, softcap: float | None = None,
    sinks: float | None = None,
) -> Run:  # fmt: skip
    """Attend in one pass for several sequences, each given as (past, new, queries).

    `scale` is the size of the queries, and `sinks` the mean of the sinks.

    The cache of a sequence has `past` + `new` tokens; the last `queries` of them are queries. Pages are in random
    order, and pages of no sequence hold garbage.
    """

    def run(be: Backend, rng: np.random.Generator) -> Any:
        store, spans = stored(be, rng, [(past, new) for past, new, _ in sequences], kv_heads, head_dim, page)
        counts = [n for _, _, n in sequences]
        q = be.heads(be.array(normal(rng, sum(counts), heads * head_dim, scale=scale)), head_dim)
        own = None if sinks is None else weight(be, sinks + normal(rng, heads))
        return be.attention(q, KVView(store, page, spans, window), counts, Scores(head_dim**-0.5, softcap, own))

    return run


def attention_over_a_copy(n: int, past: int, page: int = 8) -> Run:
    """Attend to `past` tokens and one more, after n tokens of the last page were copied to another page."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        store, (span, other) = stored(be, rng, [(past, 1), (1, 1)], 2, 16, page)
        target = int(other.pages[0])
        store = be.kv_copy(store, int(span.pages[-1]), target, n)
        copied = KVSpan(np.append(span.pages[:-1], target), span.length, 1)
        q = be.heads(be.array(normal(rng, 1, 64)), 16)
        return be.attention(q, KVView(store, page, [copied], None), [1], Scores(0.25))

    return run


def attention_over_a_restored_page(past: int, page: int = 8) -> Run:
    """Attend to `past` tokens and one more, after the first page was read and written to another place."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        store, (span, other) = stored(be, rng, [(past, 1), (1, 1)], 2, 16, page)
        target = int(other.pages[0])
        store = be.kv_restore(store, target, np.array(be.kv_read(store, int(span.pages[0]), page)))
        moved = KVSpan(np.append(target, span.pages[1:]), span.length, 1)
        q = be.heads(be.array(normal(rng, 1, 64)), 16)
        return be.attention(q, KVView(store, page, [moved], None), [1], Scores(0.25))

    return run


def stored(
    be: Backend, rng: np.random.Generator, sequences: list[tuple[int, int]], kv_heads: int, head_dim: int, page: int
) -> tuple[Any, list[KVSpan]]:
    """Return a KV store with sequences of (past, new) tokens, and the span of each sequence in it."""

    def split(n: int, scale: float = 1.0) -> Any:
        return be.heads(be.array(normal(rng, n, kv_heads * head_dim, scale=scale)), head_dim)

    n_pages = [-(-(past + new) // page) for past, new in sequences]
    order = rng.permutation(sum(n_pages) + 2) * page
    n_slots = page * len(order)
    store = be.kv_empty(kv_heads, head_dim, n_slots)
    store = be.kv_write(store, np.arange(n_slots), split(n_slots, 9.0), split(n_slots, 9.0))
    spans = []
    for (past, new), n, end in zip(sequences, n_pages, np.cumsum(n_pages), strict=True):
        span = KVSpan(order[end - n : end].astype(np.int64), past + new, new)
        for first, last in ((0, past), (past, past + new)):
            if last > first:
                slots = np.arange(n_slots)[span.slots(first, last, page)]
                store = be.kv_write(store, slots, split(last - first), split(last - first))
        spans.append(span)
    return store, spans


def kv_nbytes(be: Backend, rng: np.random.Generator) -> Any:
    """Check the size of an empty and of a filled store: the number of bytes differs between backends."""
    filled = be.kv_write(
        be.kv_empty(2, 4, 3), np.arange(3), *(be.heads(be.array(normal(rng, 3, 8)), 4) for _ in range(2))
    )
    return int(be.kv_nbytes(be.kv_empty(2, 4, 0)) == 0) + 2 * int(be.kv_nbytes(filled) >= 2 * 2 * 4 * 3 * 2)


def shape_op(method: str, *arguments: Any, shape: tuple[int, ...] = (3, 8)) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(normal(rng, *shape)), *arguments)


def merge(be: Backend, rng: np.random.Generator) -> Any:
    return be.merge(be.heads(be.array(normal(rng, 3, 24)), 4))


def concat(be: Backend, rng: np.random.Generator) -> Any:
    return be.concat(be.array(normal(rng, 4, 3)), be.array(normal(rng, 4, 9)))


CASES = [
    OpCase("rope", "start", rope(range(5), 2, 8)),
    OpCase("rope", "one-token-deep", rope([4095], 4, 16)),
    OpCase("rope", "far", rope(range(40_000, 40_003), 2, 32, theta=1e6)),
    OpCase("rope", "scaled", scaled_rope([0, 15, 16, 47, 1000])),
    OpCase("rope", "several-sequences", rope([7, 8, 9, 0, 1, 700, 3], 2, 16)),
    OpCase("attention", "prefill", attention(6, 0, 4, 4)),
    OpCase("attention", "decode", attention(1, 9, 4, 4)),
    OpCase("attention", "chunk-in-the-middle", attention(3, 5, 4, 2)),
    OpCase("attention", "grouped", attention(4, 3, 6, 2)),
    OpCase("attention", "one-kv-head", attention(2, 4, 5, 1)),
    OpCase("attention", "first-token", attention(1, 0, 2, 2)),
    OpCase("attention", "large-scores", attention(3, 6, 2, 2, scale=300.0)),
    OpCase("attention", "window", attention(5, 4, 4, 2, window=3)),
    OpCase("attention", "window-decode", attention(1, 7, 4, 2, window=3)),
    OpCase("attention", "window-wider", attention(2, 2, 2, 1, window=50)),
    OpCase("attention", "one-page", attention(3, 9, 4, 2, page=16)),
    OpCase("attention", "pages-of-one-token", attention(2, 6, 2, 1, page=1)),
    OpCase("attention", "batch-decode", attention_of_batch([(9, 1, 1), (0, 1, 1), (30, 1, 1)], 4, 2)),
    OpCase("attention", "batch", attention_of_batch([(5, 3, 3), (0, 12, 12), (17, 1, 1)], 4, 2)),
    OpCase("attention", "batch-window", attention_of_batch([(5, 3, 3), (0, 12, 12), (17, 1, 1)], 6, 2, window=5)),
    OpCase("attention", "batch-last-queries", attention_of_batch([(5, 4, 2), (3, 2, 0), (0, 6, 1)], 4, 4, window=4)),
    OpCase("attention", "copied-page", attention_over_a_copy(4, 11)),
    OpCase("attention", "copied-page-and-garbage", attention_over_a_copy(2, 11)),
    OpCase("attention", "restored-page", attention_over_a_restored_page(11)),
    OpCase("attention", "softcap", attention(5, 4, 4, 2, softcap=2.0)),
    OpCase("attention", "softcap-decode", attention(1, 300, 4, 2, softcap=50.0, page=64)),
    OpCase("attention", "softcap-reached", attention(3, 6, 2, 2, scale=300.0, softcap=5.0)),
    OpCase("attention", "softcap-window", attention_of_batch([(5, 3, 3), (0, 40, 40)], 6, 2, window=5, softcap=1.0)),
    OpCase("attention", "softcap-narrow-heads", attention(4, 3, 4, 2, 12, softcap=1.0)),
    OpCase("attention", "sinks", attention(5, 4, 4, 2, sinks=1.0)),
    OpCase("attention", "sinks-decode", attention(1, 300, 8, 2, sinks=2.0, page=64)),
    OpCase("attention", "sinks-first-token", attention(1, 0, 2, 2, sinks=0.0)),
    OpCase("attention", "sinks-large", attention(2, 3, 4, 1, sinks=80.0)),
    OpCase("attention", "sinks-low", attention(2, 3, 4, 1, sinks=-500.0)),
    OpCase("attention", "sinks-window", attention_of_batch([(5, 3, 3), (0, 40, 40), (17, 1, 1)], 6, 2, window=5,
                                                           sinks=0.5)),
    OpCase("attention", "sinks-narrow-heads", attention(4, 3, 4, 2, 12, sinks=0.5)),
    OpCase("attention", "sinks-and-softcap", attention_of_batch([(150, 3, 3), (0, 12, 12)], 4, 2, softcap=3.0,
                                                                sinks=1.0, page=64)),
    OpCase("heads", "split", shape_op("heads", 4)),
    OpCase("merge", "join", merge),
    OpCase("columns", "middle", shape_op("columns", 2, 5)),
    OpCase("columns", "all", shape_op("columns", 0, 8, shape=(1, 8))),
    OpCase("columns", "then-scaled", lambda be, rng: be.scale(be.columns(be.array(normal(rng, 5, 12)), 3, 7), 0.5)),
    OpCase("concat", "two-widths", concat),
    OpCase("norm_rope", "queries", norm_rope(range(2, 5), SCALED.keys)),
    OpCase("norm_rope", "values", norm_rope([40, 41, 0, 3, 1000], None)),
    OpCase("take", "last-row", shape_op("take", (2,))),
    OpCase("take", "only-row", shape_op("take", (0,), shape=(1, 8))),
    OpCase("take", "rows-apart", shape_op("take", (0, 3, 4, 6), shape=(7, 8))),
    OpCase("take", "heads", lambda be, rng: be.take(be.heads(be.array(normal(rng, 4, 24)), 4), (1, 3))),
    OpCase("kv_nbytes", "law", kv_nbytes),
    OpCase("head_norm_rope", "normed", head_norm_rope(range(2, 5), normed=True)),
    OpCase("head_norm_rope", "plain", head_norm_rope([7], normed=False)),
    OpCase("head_norm_rope", "queries-grow", head_norm_rope([40, 41, 0, 3, 1000], normed=True, rope=SCALED)),
    OpCase("head_norm_rope", "queries-grow-plain", head_norm_rope([7, 17], normed=False, rope=SCALED)),
    OpCase("head_norm_rope", "several-sequences", head_norm_rope([40, 41, 0, 3, 1000], normed=True)),
]  # fmt: skip
