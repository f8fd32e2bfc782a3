"""Requests without a KV cache, one after the other: each pass runs the whole sequence again."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_engine.decode.loop import decode_without_cache
from mlx_engine.decode.output import FinishReason
from mlx_engine.decode.sampler import Sampler
from mlx_engine.schedule.request import Request
from mlx_engine.weights.model import Model


class Uncached:
    """Runs requests in their order. Used like a `Scheduler`, to show what the KV cache saves."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._queue: list[tuple[Request, Sampler, Iterator[int]]] = []

    def submit(self, request: Request) -> None:
        """Append a request with one output to the queue."""
        if len(request.outputs) > 1:
            raise ValueError(f"expected one answer to a request without a KV cache, found {len(request.outputs)}")
        pick = Sampler(self._model.backend, request.options.sampling, request.prompt_ids)
        tokens = decode_without_cache(self._model, request.prompt_ids, pick, request.metrics)
        self._queue.append((request, pick, tokens))

    def cancel(self, request: Request, reason: FinishReason | None = None) -> None:
        """End a request where it is."""
        self._queue = [entry for entry in self._queue if entry[0] is not request]
        if reason is not None:
            request.output.end(reason)

    def leave(self, request: Request) -> None:
        """Cancel a request; may be called by the garbage collector."""
        self.cancel(request)

    def step(self) -> None:
        """Append a token to the first request's output; a request that fails ends with its error."""
        if not self._queue:
            return
        request, pick, tokens = self._queue[0]
        try:
            request.output.append(next(tokens), pick, request.options.logprobs)
        except Exception as error:
            request.error = error
        if request.has_ended:
            self.cancel(request)
