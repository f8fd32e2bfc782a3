"""Check the API key, and limit the share of time in which reading requests holds the GIL.

The event loop, the engine thread and the threads that parse and encode requests share the GIL. While requests are
read, `/health` must be answered and tokens must be generated. So large bodies are read at a bounded rate (`Bodies`),
and few threads parse and encode at the same time (`Turns`). A turn is the permission to parse and encode one request.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from anyio import move_on_after
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from mlx_engine.machine.memory import give_back_freed
from mlx_engine.serve.errors import ApiError, ClientGoneError, forget

MAX_BODY = 4 << 20

# Seconds in which a client must have sent the whole body.
BODY_SECONDS = 30.0

# The headers in which a client may give its request an id, and the most characters of the id that are kept.
ID_HEADERS, MOST_ID = ("x-client-request-id", "x-request-id"), 512
client_id: ContextVar[str | None] = ContextVar("client_id", default=None)


def note_client_id(headers: Headers) -> None:
    """Set `client_id` to the id that the client gave the request, for the current task and the tasks that it starts."""
    given = next((headers[name] for name in ID_HEADERS if name in headers), None)
    client_id.set(None if given is None else given[:MOST_ID])


def check_key(headers: Headers, key: str | None) -> None:
    """Check the API key of a request; every request passes if the server has no key.

    Raises:
        ApiError: neither the header `Authorization: Bearer KEY` nor `x-api-key: KEY` has the server's key.
    """
    if key is None:
        return
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # The time of this comparison does not depend on the number of correct characters.
    if not any(hmac.compare_digest(one.strip().encode("latin-1"), key.encode()) for one in given):
        message = "wrong or missing API key; send the header 'Authorization: Bearer KEY' with this server's key"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_body(receive: Receive, headers: Headers, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: the body is larger than `limit` bytes, or has not arrived within `seconds`.
        ClientGoneError: the client has closed the connection.
    """
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    with move_on_after(seconds):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body.extend(message.get("body", b""))
            if len(body) > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)
    text = f"the body did not arrive within {seconds:g} seconds ({len(body):,} bytes did); send it again"
    raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"})


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit:,} bytes; send less, or start the server with a larger --max-body"
    # The connection stays open, and the rest of the body is read and dropped. If the server closed the connection
    # before a client has sent the whole body, the connection would be reset, and most clients would lose the response.
    return ApiError(413, message, code="request_too_large")


# The largest number of requests that have a turn at the same time, and of large requests among them.
TURNS, LARGE_TURNS = 2, 1

# A request is large if its body has more bytes than this, otherwise small.
LARGE = 1 << 16

# At most this number of large requests may wait for a turn, and as many small ones; a further one gets status 429.
# Small requests that generate text are not counted (`is_bounded` is false), because `Worker.reserved` limits them.
MOST_WAITING = 16

# Seconds between reading two pieces of large bodies. A piece has at most 256 KiB (`LARGE_READ` in server.py); the event
# loop needs about one ms to read it.
SECONDS_PER_PIECE = 0.006

T = TypeVar("T")


class Bodies:
    """Reads large bodies in pieces, at a bounded rate, and limits the memory of these bodies."""

    def __init__(self) -> None:
        self._n_bytes = 0
        self._line = asyncio.Lock()

    @contextmanager
    def reading(self, receive: Receive, most: int, check: Callable[[], object] = lambda: None) -> Iterator[Receive]:
        """Yield a function that receives the ASGI messages of one body, for use in the `with` block.

        Whenever LARGE more bytes have arrived, the function awaits `wait` before the next message. Before each message
        after the first, the function calls `check`, which may raise an exception to end reading.

        Raises:
            ApiError: raised by the yielded function if the large bodies that are being read have more than `most`
                bytes together. Messages within the first LARGE bytes of a body are not counted.
        """
        n_read = n_held = n_since = 0

        async def paced() -> Message:
            nonlocal n_read, n_held, n_since
            if n_since >= LARGE:
                n_since = 0
                await self.wait()
            if n_read:
                check()
            message = await receive()
            n = len(message.get("body", b""))
            n_read, n_since = n_read + n, n_since + n
            if n_read > LARGE:
                self._n_bytes, n_held = self._n_bytes + n, n_held + n
                if self._n_bytes > most:
                    # The connection is closed, so that the rest of the body need not be read.
                    raise _busy(f"other requests use all {most:,} bytes for large bodies", {"Connection": "close"})
            return message

        try:
            yield paced
        finally:
            self._n_bytes -= n_held

    async def wait(self) -> None:
        """Wait until the next piece of a large body may be read; callers are served in order of arrival."""
        async with self._line:
            await asyncio.sleep(SECONDS_PER_PIECE)


def _busy(why: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return the error that asks a client to try again later."""
    message = f"{why}; try again after the seconds in the header Retry-After"
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1", **(headers or {})})


class Turn:
    """The turn of one request: runs its work in a thread.

    Attributes:
        has_left: whether the turn's `with` block has ended, for example because the client has disconnected.
        begun: an event that is set when the turn begins.
        running: the future of the latest work; None before `run` is called.
    """

    def __init__(self, *, is_large: bool) -> None:
        self.is_large, self.has_left, self.begun = is_large, False, asyncio.Event()
        self.running: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and return its result.

        If the caller is cancelled, the thread continues until `work` ends or calls `check`, which then raises.
        """
        self.running = future = asyncio.get_running_loop().run_in_executor(None, work)
        # Retrieve the error here, too. If the work fails after the caller was cancelled, asyncio would otherwise log
        # that the error was never retrieved.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({future})  # unlike `await future`, this does not cancel the future
            return future.result()
        finally:
            del future  # the traceback of an error refers to this frame, and would keep the future and its error alive

    def check(self) -> None:
        """Raise ClientGoneError if `has_left`. The work calls this method between its steps."""
        if self.has_left:
            raise ClientGoneError


class Turns:
    """Gives turns to requests in order of arrival, but a small request may overtake waiting large requests."""

    def __init__(self) -> None:
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []

    @property
    def n_running(self) -> int:
        """Number of turns that have begun and whose threads have not ended."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for a turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, *, is_large: bool, is_bounded: bool = False) -> AsyncIterator[Turn]:
        """Wait for a turn. The turn ends when the `with` block has ended and the turn's thread has finished its work.

        Raises:
            ApiError: MOST_WAITING requests of this size (large or small) wait, and this one is large or `is_bounded`.
        """
        if (is_large or is_bounded) and sum(turn.is_large == is_large for turn in self._waiting) >= MOST_WAITING:
            raise _busy(f"{MOST_WAITING} other requests already wait to be read")
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
                turn.running.add_done_callback(partial(self._end_of_thread, turn))

    def _begin(self) -> None:
        for turn in list(self._waiting):
            n_large = sum(other.is_large for other in self._running)
            if len(self._running) < TURNS and not (turn.is_large and n_large >= LARGE_TURNS):
                self._waiting.remove(turn)
                self._running.append(turn)
                turn.begun.set()

    def _end_of_thread(self, turn: Turn, future: asyncio.Future[Any]) -> None:
        forget(future.exception())
        self._end(turn)

    def _end(self, turn: Turn) -> None:
        (self._running if turn in self._running else self._waiting).remove(turn)
        self._begin()
        # Large requests free a lot of memory. Give it back to the system, because glibc would keep it.
        if turn.is_large and not self._running:
            give_back_freed()
