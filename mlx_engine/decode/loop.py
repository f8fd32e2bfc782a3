"""The generation loop of one sequence: run the prompt (prefill), then one token at a time (decode); yield token ids.

Lazy backends have their own loop with the same result, see `ahead.py`. `step.py` has the step for several sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from logging import DEBUG

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVSequence, New
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.decode.ahead import decode_ahead
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.step import choose, forward, forward_logits, wanted_logits
from mlx_engine.models import Model
from mlx_engine.observe.log import event

# Tokens per prefill pass. Larger chunks make more efficient products, but attention scores take chunk x context floats
# per head.
CHUNK = LONGEST_PASS

Progress = Callable[[int, int], None]


def prefill(
    model: Model, ids: Sequence[int], kv: KVSequence, *, chunk: int = CHUNK, progress: Progress | None = None
) -> Array:
    """Run the prompt in chunks and return logits (1, V) of its last token; `ids` must not be empty.

    `progress` is called with (tokens done, tokens in total) after each chunk.
    """
    logits: Array | None = None
    for start in range(0, len(ids), chunk):
        if start:
            # A lazy backend would otherwise keep the graphs of all chunks in memory until the last is evaluated.
            model.backend.wait(kv.pool.stores.layers)
        is_last = start + chunk >= len(ids)
        logits = forward(model, New(ids[start : start + chunk], kv, wanted=int(is_last)))
        if progress is not None:
            progress(min(start + chunk, len(ids)), len(ids))
    return wanted_logits(logits)


def decode(
    model: Model,
    prompt: Sequence[int],
    kv: KVSequence,
    pick: Sampler,
    metrics: Metrics,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    overlap: bool = True,
) -> Iterator[int]:
    """Yield token ids one at a time, without end; the caller decides when to stop.

    With `overlap`, a lazy backend that is not profiled submits each pass before the host knows the token that it reads.

    Raises:
        CacheFullError: the KV cache is full.
    """
    read = partial(prefill, model, prompt, kv, chunk=chunk, progress=progress)
    if overlap and model.backend.lazy and model.backend.profiler is None:
        return decode_ahead(model, read, kv, pick, metrics)
    return _decode_in_order(model, read, kv, pick, metrics)


def _decode_in_order(
    model: Model, read: Callable[[], Array], kv: KVSequence, pick: Sampler, metrics: Metrics
) -> Iterator[int]:
    while True:
        token = _timed_pass(model, metrics, pick, read)
        yield token
        read = partial(forward_logits, model, New([token], kv))


def decode_without_cache(model: Model, prompt: Sequence[int], pick: Sampler, metrics: Metrics) -> Iterator[int]:
    """Yield the same ids as `decode`, but run the whole sequence again for each, to show what the KV cache saves."""
    ids = list(prompt)
    while True:
        token = _timed_pass(model, metrics, pick, lambda: forward_logits(model, New(ids, model.scratch_kv(len(ids)))))
        yield token
        ids.append(token)


def _timed_pass(model: Model, metrics: Metrics, pick: Sampler, read: Callable[[], Array]) -> int:
    def run() -> int:
        logits, be = read(), model.backend
        # On a lazy backend the choice is part of the graph: its time cannot be separated from the time of the pass.
        (token,) = (
            choose(be, logits, [pick]) if be.lazy else metrics.record_sampling(lambda: choose(be, logits, [pick]))
        )
        return token

    profiler = model.backend.profiler
    if profiler is not None:
        profiler.begin_pass()
    # The session ends with the pass, because the caller's code runs between two tokens.
    with model.backend.session():
        token = metrics.record_timed(run)
    if profiler is not None:
        event(DEBUG, "pass", number=len(metrics.passes), total_ms=metrics.passes[-1] * 1e3, **profiler.end_pass())
    return token
