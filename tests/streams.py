"""Requests and streams for models that are no `Engine`s: what `Engine.run` does without checkpoint and tokenizer."""

from __future__ import annotations

from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.output import Output
from mlx_engine.options import Options
from mlx_engine.schedule.request import Request
from mlx_engine.schedule.scheduler import Scheduler
from mlx_engine.schedule.stream import Stream
from mlx_engine.schedule.uncached import Uncached


class Marks:
    """A decoder that makes one character of every token."""

    def add(self, token_id: int) -> str:
        return chr(0x4E00 + token_id)

    def finish(self) -> str:
        return ""


def request_of(prompt, options=None, *, max_tokens, n=1, text=None, end_ids=(), metrics=None) -> Request:
    """A request whose answers have so many tokens."""
    options = options or Options()
    outputs = [Output(options, max_tokens=max_tokens, text=text or Marks(), end_ids=end_ids) for _ in range(n)]
    return Request(prompt, options, outputs, metrics=metrics)


def stream_of(model, prompt, options, *, max_tokens, text, end_ids, metrics=None, progress=None) -> Stream:
    """A stream over one request to a model."""
    metrics = metrics or Metrics()
    request = request_of(prompt, options, max_tokens=max_tokens, text=text, end_ids=end_ids, metrics=metrics)
    if not options.kv:
        return Stream(Uncached(model), request, progress=progress)
    scheduler = Scheduler(model, model.new_pool(request.longest), clock=metrics.clock)
    return Stream(scheduler, request, progress=progress)
