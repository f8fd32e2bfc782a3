"""Runs of a model at the level of the model runner: sequences, KV caches and samplers that a test makes itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from mlx_engine.backends.parameters import Array, Token
from mlx_engine.cache import KVSequence, SequenceInput
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.loop import request as loop_request
from mlx_engine.loop.forward import forward, wanted_logits
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.runner import ModelRunner
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Options
from mlx_engine.weights.model import Model
from tests.streams import Marks, request_of, stream_of


def sequence_of(kv: KVSequence, sampler: Sampler, unread: Sequence[Token]) -> loop_request.Sequence:
    """A sequence of a request without end."""
    request = request_of([0], max_tokens=1 << 30)
    return loop_request.Sequence(request, request.output, kv, sampler, list(unread))


def prefill(model: Model, ids: Sequence[int], kv: KVSequence, *, chunk: int = LONGEST_PASS) -> Array:
    """Run tokens in chunks, and return logits (1, V) of the last one."""
    logits = None
    for start in range(0, len(ids), chunk):
        is_last = start + chunk >= len(ids)
        logits = forward(model, SequenceInput(ids[start : start + chunk], kv, wanted=int(is_last)))
        model.backend.wait(kv.pool.stores.arrays)
    return wanted_logits(logits)


def decode(
    model: Model,
    prompt: Sequence[int],
    kv: KVSequence,
    sampler: Sampler,
    metrics: Metrics | None = None,
    *,
    chunk: int = LONGEST_PASS,
    overlap: bool = True,
) -> Iterator[int]:
    """Yield token ids one at a time, without end."""
    metrics = metrics or Metrics()
    sequence, runner = sequence_of(kv, sampler, prompt), ModelRunner(model, overlap=overlap, clock=metrics.clock)
    seconds = 0.0
    try:
        while True:
            done = runner.step(lambda: [sequence.chunk(chunk)])
            for _, error in done.failed:
                raise error
            seconds += done.seconds
            if done.chosen:
                metrics.record_pass(seconds, sampling=done.sampling)
                seconds = 0.0
                yield done.chosen[0][1][0]
    finally:
        runner.drop(sequence)


def greedy_ids(model: Model, prompt: Sequence[int], n: int, *, kv: bool = True) -> list[int]:
    """The n most likely tokens after a prompt, by the scheduler, with or without a KV cache."""
    stream = stream_of(model, prompt, Options(kv=kv), max_tokens=n, text=Marks(), end_ids=())
    for _ in islice(stream, n):
        pass
    return stream.generation.token_ids
