"""Streams: iterators over the text of an answer, which run scheduler steps until the next piece of text is complete.

`Engine.stream` returns a `Stream`, and `Engine.generate` reads one to its end. The timeout starts when the first piece
is requested. It is checked after every step, that is after every token and every prompt chunk. It does not interrupt a
pass.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeAlias

from mlx_engine.errors import ConstraintError, NotCopyableError, NotFiniteError, ProcessorError
from mlx_engine.loop.logprobs import TokenLogprobs, digest
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import FinishReason
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import name_of

Progress = Callable[[int, int], None]

# A run is the generation of one answer. In a batch (`Engine.generate_batch`), these errors end only the failed run.
RunError: TypeAlias = NotFiniteError | ConstraintError | ProcessorError
RUN_ERRORS = (NotFiniteError, ConstraintError, ProcessorError)

# The largest number of characters of the text in the repr of a generation.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, repr=False)
class Generation:
    """The result of a run.

    Attributes:
        text: the new text, without the end-of-text or stop token and without the stop string.
        token_ids: the new tokens, including the end-of-text or stop token if there is one.
        metrics: times of the passes.
        finish_reason: "stop" after an end-of-text token, stop token or stop string, or when the constraint allows no
            more text; "length" at the token limit; "timeout" after the timeout; "error" if a run of a batch failed;
            None if the run continues or was closed before its end.
        prompt_ids: the tokens of the prompt.
        logprobs: the log-probabilities of each new token; None if the options do not ask for them.
        prompt_logprobs: the log-probabilities of each token of the prompt after the first; None if the options do not
            ask for them.
        n_cached: number of tokens of the prompt that were taken from the prefix cache.
        error: the error that ended a run of a batch, or None. A run that is not in a batch raises its error instead.
        stop: the stop string or the stop token id that ended the run; None if neither did.
        n_proposed: number of proposed tokens that passes have run; see docs/speculation.md.
        n_accepted: number of proposed tokens that were accepted.
        drafters: maps the name of each drafter (a source of proposed tokens) that has proposed tokens to the numbers of
            proposed and accepted tokens.
        processors: the names of the run's processors and of its sampler function. If there are any, the tokens
            depend on the code of these functions too, not only on prompt, options and seed.
    """

    text: str
    token_ids: list[int]
    metrics: Metrics
    finish_reason: FinishReason | Literal["error"] | None
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    n_cached: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: RunError | None = None
    stop: str | int | None = None
    processors: tuple[str, ...] = ()
    n_proposed: int = 0
    n_accepted: int = 0
    drafters: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """The decode rate: tokens after the first, divided by the time of their passes; None without a second token."""
        return self.metrics.decode_tokens_per_second

    @property
    def digest(self) -> str | None:
        """The SHA-256 of token ids and log-probabilities, as in server replies; None without log-probabilities."""
        if self.logprobs is None:
            return None
        return digest(self.token_ids, [token.logprob for token in self.logprobs])

    def _repr_markdown_(self) -> str:
        """Return the text, quoted, and a line about the run. IPython notebooks call this method."""
        quoted = "\n".join(f"> {line}" for line in self.text.split("\n"))
        return f"{quoted}\n\n*{self._about}*"

    def __repr__(self) -> str:
        is_short = len(self.text) <= SHOWN_CHARACTERS
        text = self.text if is_short else self.text[: SHOWN_CHARACTERS - 1] + "…"
        return f"<Generation {text!r}: {self._about}>"

    @property
    def _about(self) -> str:
        ended = "not ended" if self.finish_reason is None else f"ended by {self.finish_reason}"
        rates = [] if self.tokens_per_second is None else [f"{self.tokens_per_second:,.1f} tokens/s"]
        n = len(self.token_ids)
        return ", ".join([f"{n:,} {'token' if n == 1 else 'tokens'}", ended, *rates])


class Stream:
    """An iterator over pieces of text.

    Several streams may share a scheduler: a step for one stream also continues the other streams. If `progress` is not
    None, it is called with (prompt tokens done, prompt tokens in total) during prefill.
    """

    def __init__(self, scheduler: Scheduler, request: Request, *, progress: Progress | None = None) -> None:
        self.progress, self.request = progress, request
        self._n_yielded, self._deadline = 0, math.inf
        self._is_started, self._is_cancelled, self._n_reported = False, False, 0
        scheduler.submit(request)
        self._scheduler: Scheduler | None = scheduler
        # When a stream is garbage-collected, its request is cancelled, which frees the request's memory at once.
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
                if self._is_cancelled:
                    self.close()
                    break
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
        """Cancel the run and free its KV cache. `generation` keeps the result so far."""
        if self._scheduler is not None:
            self._leave()
            self._scheduler = None

    def cancel(self) -> None:
        """End the iteration before its next forward pass. Unlike `close`, any thread may call this during a pass."""
        self._is_cancelled = True

    def __aiter__(self) -> AsyncStream:
        """Return an asynchronous iterator, whose forward passes run in a thread; see `Engine.astream`."""
        return AsyncStream(lambda: self)

    @property
    def token_ids(self) -> Sequence[int]:
        """The new tokens so far. This is not a copy, so it is faster than `generation`, which copies everything."""
        return self.request.output.token_ids

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """The log-probabilities of the new tokens so far, not a copy; empty if the options do not ask for them."""
        return self.request.output.logprobs or ()

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def n_read(self) -> int:
        """The most tokens that the run may put into the KV cache: the prompt, and all new tokens but the last one."""
        return self.request.longest

    @property
    def generation(self) -> Generation:
        """The result so far."""
        request, output, options = self.request, self.request.output, self.request.options
        functions = (*options.processors, options.sampler)
        return Generation(
            output.text,
            list(output.token_ids),
            copy.deepcopy(request.metrics),
            output.finish_reason,
            list(request.prompt_ids),
            None if output.logprobs is None else list(output.logprobs),
            request.n_cached,
            request.prompt_logprobs,
            stop=output.stop,
            processors=tuple(name_of(function) for function in functions if function is not None),
            n_proposed=request.n_proposed,
            n_accepted=request.n_accepted,
            drafters={name: (counts[0], counts[1]) for name, counts in request.drafters.items()},
        )

    def _step(self, scheduler: Scheduler) -> None:
        """Run a step, report progress, and check the timeout."""
        request = self.request
        scheduler.step()
        if request.error is not None:
            # The error's traceback holds the scheduler. Keep no reference to the error here, so that the scheduler's
            # memory is freed when the caller has handled the error.
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
    """Run a stream to its end and return the result. If a `RunError` ends the stream, the result includes the error."""
    try:
        return drained(stream)
    except RUN_ERRORS as error:
        return failed(stream, error)


def failed(stream: Stream, error: RunError) -> Generation:
    """Return the result so far of a stream that has raised `error`; the result includes the error."""
    return replace(stream.generation, finish_reason="error", error=error.with_traceback(None))


class AsyncStream:
    """An asynchronous iterator over pieces of text: `async for piece in engine.astream(prompt)`.

    The forward passes run in a separate thread, so that the event loop is never blocked. The run begins when the first
    piece is read, and each piece is computed when it is read. The run ends after the current pass if the task is
    cancelled, if `aclose()` is called, or if `async with` ends. Passes of several streams are interleaved. Only one
    task at a time may read a stream.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        """Make a stream. `begin` is called in the separate thread; it submits the request and returns its `Stream`."""
        self._begin = begin
        self._stream: Stream | None = None
        self._thread = ThreadPoolExecutor(1, "mlx_engine-stream")
        self._is_closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        if self._is_closed:
            raise StopAsyncIteration
        import asyncio  # not at the top: it takes 30 ms, and most programs need no event loop

        running = self._thread.submit(self._advance)
        try:
            piece = await asyncio.wrap_future(running)
        except BaseException:  # an error of the run, or the cancellation of the task
            self._leave()
            raise
        if piece is None:
            self._leave()
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the run, and wait until its keys and values are freed; `generation` keeps the result so far."""
        import asyncio

        ended = self._leave()
        if ended is not None:
            await asyncio.shield(asyncio.wrap_future(ended))

    @property
    def generation(self) -> Generation:
        """The result so far.

        Raises:
            RuntimeError: the run has not begun.
        """
        if self._stream is None:
            raise RuntimeError("generation: expected a stream that has begun, found one that has not; request a piece")
        return self._stream.generation

    def _advance(self) -> str | None:
        """Return the next piece, or None at the end. Runs in the separate thread."""
        if self._is_closed:
            return None
        if self._stream is None:
            self._stream = self._begin()
        return next(self._stream, None)

    def _leave(self) -> Future[None] | None:
        """Ask the thread to end the run. Return a future that is done when the run has ended; None at later calls."""
        if self._is_closed:
            return None
        self._is_closed = True
        if self._stream is not None:
            self._stream.cancel()  # else the thread would complete the next piece first
        ended = self._thread.submit(self._end)
        self._thread.shutdown(wait=False)
        return ended

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
