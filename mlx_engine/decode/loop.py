"""The loop: read the prompt (prefill), then write one token at a time (decode). It yields token ids, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from logging import DEBUG

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import Cache
from mlx_engine.decode.metrics import Metrics
from mlx_engine.models import Model
from mlx_engine.observe.log import event

# Tokens of a prompt that go through the model together. Larger chunks multiply larger matrices, but their attention
# scores take chunk x context floats per head.
CHUNK = 512

Pick = Callable[[Array], int]
Progress = Callable[[int, int], None]


def prefill(
    model: Model, ids: Sequence[int], cache: Cache, *, chunk: int = CHUNK, progress: Progress | None = None
) -> Array:
    """Logits (1, V) after the last of `ids`, which must be at least one; the cache then holds all of them.

    `progress` is called with (tokens read, tokens in all) after each chunk.
    """
    logits = None
    for start in range(0, len(ids), chunk):
        logits = model.forward(ids[start : start + chunk], cache)
        if progress is not None:
            progress(min(start + chunk, len(ids)), len(ids))
    return logits


def decode(
    model: Model,
    prompt: Sequence[int],
    cache: Cache,
    pick: Pick,
    metrics: Metrics,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> Iterator[int]:
    """Token ids one at a time, without end; the caller decides when to stop.

    Raises:
        CacheFullError: the cache has no room for the next token.
    """
    token = _timed_pass(model, metrics, pick, lambda: prefill(model, prompt, cache, chunk=chunk, progress=progress))
    while True:
        yield token
        token = _timed_pass(model, metrics, pick, partial(model.forward, [token], cache))


def decode_without_cache(model: Model, prompt: Sequence[int], pick: Pick, metrics: Metrics) -> Iterator[int]:
    """The same ids, the whole sequence run again for each: what a cache saves is the difference."""
    ids = list(prompt)
    while True:
        token = _timed_pass(model, metrics, pick, lambda: model.forward(ids, model.no_cache()))
        yield token
        ids.append(token)


def _timed_pass(model: Model, metrics: Metrics, pick: Pick, forward: Callable[[], Array]) -> int:
    def run() -> int:
        logits = forward()
        # On a lazy backend the choice is a part of the graph, and waiting for it is waiting for the whole pass.
        return pick(logits) if model.backend.lazy else metrics.record_sampling(lambda: pick(logits))

    profiler = model.backend.profiler
    if profiler is not None:
        profiler.begin_pass()
    # The session ends with the pass: between two tokens the caller's own code runs.
    with model.backend.session():
        token = metrics.record_timed(run)
    if profiler is not None:
        event(DEBUG, "pass", number=len(metrics.passes), total_ms=metrics.passes[-1] * 1e3, **profiler.end_pass())
    return token
