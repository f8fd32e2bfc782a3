"""The state of one HTTP call: its requests, and the progress of their answers.

The event loop reads this state, and after each step of the scheduler updates it with the `Progress` objects that the
engine thread has sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anyio import move_on_after

from mlx_engine.loop.output import FinishReason, Output
from mlx_engine.loop.request import Request


class Progress(NamedTuple):
    """The lengths of an output after a step of the scheduler, and the finish reason if the output is complete.

    The event loop reads the output only up to these lengths, and the engine thread only appends, so no lock is needed.
    """

    n_tokens: int = 0
    n_pieces: int = 0
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, output: Output) -> Progress:
        """Return the progress of an output; called by the engine thread between two steps."""
        return cls(len(output.token_ids), len(output.pieces), output.finish_reason)


class Call:
    """The requests of one HTTP call, whose answers form one reply.

    Attributes:
        requests: the requests, in the order of the prompts.
        accepted: a future that is done when the scheduler has accepted or refused the requests. After a refusal, the
            exception of the future is the error.
        error: the error with which the requests were refused, or which ended at least one of them; or None.
        received: the time at which the body had been read and the model was loaded, in seconds of the server's clock.
        tokenized: the time at which all prompts had been encoded.
        client_id: the id that the client gave the HTTP request, or None.
    """

    def __init__(
        self, requests: Sequence[Request], *, received: float, tokenized: float, client_id: str | None = None
    ) -> None:
        self.requests, self.received, self.tokenized = tuple(requests), received, tokenized
        self.client_id = client_id
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        self._reached = {request: [Progress() for _ in request.outputs] for request in self.requests}
        self._changed = asyncio.Event()

    @property
    def outputs(self) -> list[tuple[Output, Progress]]:
        """All outputs, in the order of the reply's choices, each with its progress."""
        return [pair for request in self.requests for pair in zip(request.outputs, self._reached[request], strict=True)]

    def reached(self, request: Request) -> list[Progress]:
        """Return the progress of the outputs of a request."""
        return list(self._reached[request])

    @property
    def n_answers(self) -> int:
        """Number of answers."""
        return sum(len(request.outputs) for request in self.requests)

    @property
    def has_ended(self) -> bool:
        """Whether the call has ended: all answers are complete, or there is an error."""
        return self.error is not None or not self.is_unfinished

    @property
    def is_unfinished(self) -> bool:
        """Whether an answer is still incomplete."""
        return any(progress.finish_reason is None for _, progress in self.outputs)

    @property
    def phase(self) -> str:
        """The phase of the call, for the SSE comments of a stream: "queued", "prefill n/m" (tokens) or "decode".

        This is the phase of the first request without a generated token, or "decode" if there is no such request.
        """
        for request in self.requests:
            if request.times.admitted is None:
                return "queued"
            if request.times.first_token is None:
                return f"prefill {request.n_prefilled}/{len(request.prompt_ids)}"
        return "decode"

    def update(self, reached: Mapping[Request, Sequence[Progress]], error: Exception | None = None) -> None:
        """Store new progress of requests, and the first error; wake the coroutine that waits in `changed`."""
        self._reached.update({request: list(of) for request, of in reached.items() if request in self._reached})
        self.error = self.error or error
        self._changed.set()

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for an update; return whether there was one."""
        # Use `move_on_after`: before Python 3.12, `asyncio.wait_for` loses a cancellation that arrives with an update.
        with move_on_after(seconds):
            await self._changed.wait()
        is_new = self._changed.is_set()
        self._changed.clear()
        return is_new

    async def ended(self) -> None:
        """Wait until the call `has_ended`; raise its `error` if there is one."""
        while not self.has_ended:
            await self.changed()
        if self.error is not None:
            raise self.error
