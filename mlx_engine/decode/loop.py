"""Prefill and decode of one sequence, for measurements and tests: yield token ids one at a time.

`schedule/` runs requests with the same passes, see `passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVSequence, New
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.decode.finite import check_logits
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.passes import Part, Passes, Running
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.step import forward, forward_logits, wanted_logits
from mlx_engine.weights.model import Model

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
            model.backend.wait(kv.pool.stores.arrays)
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
    overlap: bool = True,
) -> Iterator[int]:
    """Yield token ids one at a time, without end; the caller decides when to stop.

    With `overlap`, a lazy backend that is not profiled submits each pass before the host knows the token that it reads.

    Raises:
        CacheFullError: the KV cache is full.
        NotFiniteError: logits are NaN or infinite.
    """
    sequence, passes = Running(kv, pick, list(prompt)), Passes(model, overlap=overlap, clock=metrics.clock)

    def plan() -> list[Part]:
        n = min(chunk, len(sequence.unread))
        return [Part(sequence, n, (pick,) if n == len(sequence.unread) else ())]

    seconds = 0.0
    try:
        while True:
            step = passes.step(plan)
            for _, error in step.failed:
                raise error
            seconds += step.seconds
            if step.chosen:
                metrics.record_pass(seconds, sampling=step.sampling)
                seconds = 0.0
                yield step.chosen[0].ids[0]
    finally:
        passes.close()


def decode_without_cache(model: Model, prompt: Sequence[int], pick: Sampler, metrics: Metrics) -> Iterator[int]:
    """Yield the same ids as `decode`, but run the whole sequence again for each, to show what the KV cache saves.

    Raises:
        NotFiniteError: logits are NaN or infinite.
    """
    ids = list(prompt)

    def run() -> int:
        logits = forward_logits(model, New(ids, model.scratch_kv(len(ids))))
        check_logits(model, logits, ids)
        # On a lazy backend the choice is part of the graph: its time cannot be separated from the time of the pass.
        return pick(logits) if model.backend.lazy else metrics.record_sampling(lambda: pick(logits))

    while True:
        with model.backend.session():
            token = metrics.record_timed(run)
        yield token
        ids.append(token)
