"""Turns at the threads that read requests: few at a time, and only while their clients are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mlx_engine.serve.errors import ApiError, ClientGoneError

# Turns at the same time; of these, turns of large requests. The event loop, the engine thread and these threads share
# one interpreter: more of them would only delay each other and `/health`.
TURNS, LARGE_TURNS = 2, 1

# Bytes of a body above which a request is large.
LARGE = 1 << 16

T = TypeVar("T")


class Turn:
    """Runs work in a thread, one piece after the other.

    Attributes:
        is_large: whether the request is large.
        has_left: whether nobody waits for the work any more.
        begun: set when the turn begins.
    """

    def __init__(self, *, is_large: bool) -> None:
        self.is_large, self.has_left, self.begun = is_large, False, asyncio.Event()
        self.running: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. If the caller is cancelled, the thread goes on until it calls `check`."""
        self.running = future = asyncio.get_running_loop().run_in_executor(None, work)
        await asyncio.wait({future})  # unlike `await future`, this does not cancel the future
        return future.result()

    def check(self) -> None:
        """Raise ClientGoneError if nobody waits for the work any more. For the thread to call between two pieces."""
        if self.has_left:
            raise ClientGoneError


class Turns:
    """Lets requests take turns in the order of their arrival. A short one overtakes a large one that has to wait."""

    def __init__(self) -> None:
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []

    @property
    def n_running(self) -> int:
        """Number of turns that have begun and whose threads have not ended."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of requests in the line."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, *, is_large: bool, most_waiting: int | None = None) -> AsyncIterator[Turn]:
        """Wait for a turn. It ends with the block, or with the work that a thread does for a client that has left.

        Raises:
            ApiError: `most_waiting` requests are in the line.
        """
        if most_waiting is not None and len(self._waiting) >= most_waiting:
            message = f"the line: expected at most {most_waiting} requests, found as many; try again after Retry-After"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        turn = Turn(is_large=is_large)
        self._waiting.append(turn)
        self._begin()
        try:
            await turn.begun.wait()
            yield turn
        finally:
            turn.has_left = True
            if turn.running is None or turn.running.done():
                self._end(turn)
            else:
                turn.running.add_done_callback(lambda future: (future.exception(), self._end(turn)))

    def _begin(self) -> None:
        for turn in list(self._waiting):
            n_large = sum(other.is_large for other in self._running)
            if len(self._running) < TURNS and not (turn.is_large and n_large >= LARGE_TURNS):
                self._waiting.remove(turn)
                self._running.append(turn)
                turn.begun.set()

    def _end(self, turn: Turn) -> None:
        (self._running if turn in self._running else self._waiting).remove(turn)
        self._begin()
