"""The loop: read the prompt (prefill), then write one token at a time (decode). It yields token ids, nothing else.

A lazy backend has a loop of its own, see `ahead.py`; what it yields is the same. `step.py` has the same step for
several sequences at once.
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
from mlx_engine.decode.step import choose, forward
from mlx_engine.models import Model
from mlx_engine.observe.log import event

# Tokens of a prompt that go through the model together. Larger chunks multiply larger matrices, but their attention
# scores take chunk x context floats per head.
CHUNK = LONGEST_PASS

Progress = Callable[[int, int], None]


def prefill(
    model: Model, ids: Sequence[int], kv: KVSequence, *, chunk: int = CHUNK, progress: Progress | None = None
) -> Array:
    """Return logits (1, V) of the last of `ids`, which must be at least one; the sequence then holds all of them.

    `progress` is called with (tokens read, tokens in all) after each chunk.
    """
    logits = None
    for start in range(0, len(ids), chunk):
        if start:
            # A lazy backend would keep what every chunk computes until the last is asked for.
            model.backend.wait(kv.pool.stores.layers)
        is_last = start + chunk >= len(ids)
        logits = forward(model, New(ids[start : start + chunk], kv, wanted=int(is_last)))
        if progress is not None:
            progress(min(start + chunk, len(ids)), len(ids))
    return logits


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

    With `overlap` a lazy backend begins each pass before the token that it reads is known, unless somebody profiles it.

    Raises:
        CacheFullError: there is no room for the next token.
    """
    read = partial(prefill, model, prompt, kv, chunk=chunk, progress=progress)
    if overlap and model.backend.lazy and model.backend.profiler is None:
        return decode_ahead(model, read, kv, pick, metrics)
    return _decode_in_turn(model, read, kv, pick, metrics)


def _decode_in_turn(
    model: Model, read: Callable[[], Array], kv: KVSequence, pick: Sampler, metrics: Metrics
) -> Iterator[int]:
    while True:
        token = _timed_pass(model, metrics, pick, read)
        yield token
        read = partial(forward, model, New([token], kv))


def decode_without_cache(model: Model, prompt: Sequence[int], pick: Sampler, metrics: Metrics) -> Iterator[int]:
    """Yield the same ids, the whole sequence run again for each: what a cache saves is the difference."""
    ids = list(prompt)
    while True:
        token = _timed_pass(model, metrics, pick, lambda: forward(model, New(ids, model.scratch_kv(len(ids)))))
        yield token
        ids.append(token)


def _timed_pass(model: Model, metrics: Metrics, pick: Sampler, read: Callable[[], Array]) -> int:
    def run() -> int:
        logits, be = read(), model.backend
        # On a lazy backend the choice is a part of the graph, and waiting for it is waiting for the whole pass.
        (token,) = (
            choose(be, logits, [pick]) if be.lazy else metrics.record_sampling(lambda: choose(be, logits, [pick]))
        )
        return token

    profiler = model.backend.profiler
    if profiler is not None:
        profiler.begin_pass()
    # The session ends with the pass: between two tokens the caller's own code runs.
    with model.backend.session():
        token = metrics.record_timed(run)
    if profiler is not None:
        event(DEBUG, "pass", number=len(metrics.passes), total_ms=metrics.passes[-1] * 1e3, **profiler.end_pass())
    return token
