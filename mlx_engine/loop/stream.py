"""A request as a stream of text: an iterator that runs as many steps as the next piece of text needs.

The timeout starts when the first piece is requested. It is checked after every step, so after every token and every
prompt chunk. A pass is not interrupted.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from mlx_engine.errors import NotCopyableError, NotFiniteError
from mlx_engine.loop.logprobs import TokenLogprobs
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import FinishReason
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler

Progress = Callable[[int, int], None]


# Characters of the text in the repr of a generation.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, repr=False)
class Generation:
    """The result of a run.

    Attributes:
        text: the new text, without the end-of-text token and without the stop string.
        token_ids: the new tokens, including the end-of-text token if there is one.
        metrics: times of the passes.
        finish_reason: "stop" at an end-of-text token or stop string, "length" at the token limit, "timeout" if the
            timeout came first, "error" if it failed; None while the run continues.
        prompt_ids: the tokens of the prompt.
        logprobs: the log-probabilities of each new token, if they were asked for.
        prompt_logprobs: those of each token of the prompt after the first, if they were asked for.
        n_cached: tokens of the prompt that were taken from the prefix cache.
        error: why the run failed, in a batch; a run that is not in a batch raises the error.
    """

    text: str
    token_ids: list[int]
    metrics: Metrics
    finish_reason: FinishReason | Literal["error"] | None
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    n_cached: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: NotFiniteError | None = None

    def __repr__(self) -> str:
        is_short = len(self.text) <= SHOWN_CHARACTERS
        text = self.text if is_short else self.text[: SHOWN_CHARACTERS - 1] + "…"
        ended = "not ended" if self.finish_reason is None else f"ended by {self.finish_reason}"
        rate = self.metrics.decode_tokens_per_second
        rates = [] if rate is None else [f"{rate:,.1f} tokens/s"]
        n = len(self.token_ids)
        about = ", ".join([f"{n:,} {'token' if n == 1 else 'tokens'}", ended, *rates])
        return f"<Generation {text!r}: {about}>"


class Stream:
    """An iterator over pieces of text; `generation` is the result so far.

    Several streams may share a scheduler: a step for one of them also continues the others.

    `progress`, if it is not None, is called with (tokens done, tokens in total) during prefill.
    """

    def __init__(self, scheduler: Scheduler, request: Request, *, progress: Progress | None = None) -> None:
        self.progress, self.request = progress, request
        self._n_yielded, self._deadline = 0, math.inf
        self._is_started, self._n_reported = False, 0
        scheduler.submit(request)
        self._scheduler: Scheduler | None = scheduler
        # A stream that is dropped leaves the scheduler, and frees its memory at once.
        self._leave = weakref.finalize(self, scheduler.leave, request)
        self._leave.atexit = False

    def __iter__(self) -> Stream:
        return self

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError(name="stream", hint="its `generation` can be pickled and copied")

    def __next__(self) -> str:
        timeout = self.request.options.timeout
        if not self._is_started and timeout is not None:
            self._deadline = self.request.metrics.clock() + timeout
        self._is_started = True
        output = self.request.output
        try:
            while self._n_yielded == len(output.pieces) and output.finish_reason is None and self._scheduler:
                self._step(self._scheduler)
        except BaseException:
            self.close()
            raise
        if output.finish_reason is not None:
            self.close()
        if self._n_yielded == len(output.pieces):
            raise StopIteration
        self._n_yielded += 1
        return output.pieces[self._n_yielded - 1]

    def close(self) -> None:
        """Cancel the run and free its KV cache; `generation` keeps the result so far."""
        if self._scheduler is not None:
            self._leave()
            self._scheduler = None

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def n_read(self) -> int:
        """The largest number of tokens that the model runs: all but the last new token."""
        return self.request.longest

    @property
    def generation(self) -> Generation:
        """The result so far."""
        request, output = self.request, self.request.output
        return Generation(
            output.text,
            list(output.token_ids),
            copy.deepcopy(request.metrics),
            output.finish_reason,
            list(request.prompt_ids),
            None if output.logprobs is None else list(output.logprobs),
            request.n_cached,
            request.prompt_logprobs,
        )

    def _step(self, scheduler: Scheduler) -> None:
        """Run a step, report progress, and check the timeout."""
        request = self.request
        scheduler.step()
        if request.error is not None:
            # The traceback refers to the scheduler: its memory is free when the caller has handled the error.
            error, request.error = request.error, None
            try:
                raise error
            finally:
                del error
        if self.progress is not None and request.n_prefilled > self._n_reported:
            self._n_reported = request.n_prefilled
            self.progress(self._n_reported, len(request.prompt_ids))
        is_late = self._deadline < math.inf and request.metrics.clock() >= self._deadline
        if is_late and request.output.finish_reason is None:
            scheduler.cancel(request, "timeout")


def drained(stream: Stream) -> Generation:
    """Run a stream to its end and return the result."""
    for _ in stream:
        pass
    return stream.generation


def outcome(stream: Stream) -> Generation:
    """Run a stream to its end and return the result; if its logits are not finite, the result so far with the error."""
    try:
        return drained(stream)
    except NotFiniteError as error:
        return failed(stream, error)


def failed(stream: Stream, error: NotFiniteError) -> Generation:
    """Return the result so far of a stream that has raised an error, with the error."""
    return replace(stream.generation, finish_reason="error", error=error.with_traceback(None))
