"""The minimum work of a test: bytes read from memory, and arithmetic. Computed from sizes, not measured.

Every pass reads each matrix once, for any number of tokens; of experts, the expected share that its tokens choose.
Embedding lookups are neglected. A tied embedding table
counts once, as the output head. The head, and the last layer after its keys and values, are computed for the last token
of a pass only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mlx_engine.backends.experts import share_read
from mlx_engine.bench.samples import Test
from mlx_engine.bench.sizes import Sizes
from mlx_engine.cache.pool import LONGEST_PASS


@dataclass(frozen=True)
class Work:
    """The work of one or more passes."""

    flops: float
    nbytes: float


def work(of: Sizes, test: Test, *, kv: bool) -> Work:
    """Return the work of the timed passes of a test."""
    each = [pass_work(of, [part], kv=kv) for part in passes(test, kv=kv)]
    return Work(sum(one.flops for one in each), sum(one.nbytes for one in each))


def pass_work(of: Sizes, parts: Iterable[tuple[int, int, int]], *, kv: bool = True) -> Work:
    """Return the work of one pass over parts of sequences: each (new tokens, cached tokens, rows of logits)."""
    flops, cached, rows, n_tokens = 0.0, 0.0, 0, 0
    for n, before, wanted in parts:
        everything, latest = n * before + n * (n + 1) // 2, sum(min(of.window, before + i) for i in range(1, n + 1))
        scored = (of.scored - of.scored_last) * _mean(of, everything, latest)
        scored += wanted * of.scored_last * _mean(of, before + n, min(of.window, before + n))
        flops += 2.0 * (of.layers * n - of.behind * (n - wanted) + wanted * of.head + scored)
        # Keys and values visible to any of the new tokens are read.
        cached += of.cached * _mean(of, before + n, min(before + n, of.window - 1 + n)) if kv else 0
        rows, n_tokens = rows + wanted, n_tokens + n
    experts = of.expert_nbytes * share_read(of.expert_share, n_tokens)
    return Work(flops, (of.nbytes if rows else of.nbytes - of.head_nbytes) + experts + cached)


def _mean(of: Sizes, everywhere: int, nearby: int) -> float:
    """Return the average over layers: `nearby` for sliding-window layers, `everywhere` for the others."""
    return (1 - of.local) * everywhere + of.local * nearby


def passes(test: Test, *, kv: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (new tokens, cached tokens, rows of logits) of every timed pass of a test."""
    before = test.depth + test.n_prompt
    if not kv:
        yield from [(before, 0, 1)] if test.n_prompt else []
        yield from ((before + 1 + i, 0, 1) for i in range(test.n_gen))
        return
    for start in range(0, test.n_prompt, LONGEST_PASS):
        yield min(LONGEST_PASS, test.n_prompt - start), test.depth + start, int(start + LONGEST_PASS >= test.n_prompt)
    yield from ((1, before + i, 1) for i in range(test.n_gen))
