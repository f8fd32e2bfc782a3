"""Streams over models that are no `Engine`s: what `Engine.run` does without a checkpoint and a tokenizer."""

from __future__ import annotations

from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.output import Output
from mlx_engine.schedule.request import Request
from mlx_engine.schedule.scheduler import Scheduler
from mlx_engine.schedule.stream import Stream
from mlx_engine.schedule.uncached import Uncached


def stream_of(model, prompt, options, *, max_tokens, text, end_ids, metrics=None, progress=None) -> Stream:
    """A stream over one request to a model."""
    metrics = metrics or Metrics()
    output = Output(options, max_tokens=max_tokens, text=text, end_ids=end_ids)
    request = Request(prompt, options, [output], metrics=metrics)
    if not options.kv:
        return Stream(Uncached(model), request, progress=progress)
    scheduler = Scheduler(model, model.new_pool(request.longest), clock=metrics.clock)
    return Stream(scheduler, request, progress=progress)
