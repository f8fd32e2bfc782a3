"""Server-sent events: their bytes, responses that stream them, and cancelling the work of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_engine.serve.errors import ApiError, ClientGoneError, api_error, forget, is_of_messages, messages_error
from mlx_engine.serve.limits import SECONDS_PER_PIECE

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """Return an event whose data is a value as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return an event whose name is the `type` of its data."""
    name: str = value["type"]
    return f"event: {name}\n".encode() + event(value)


def comment(text: str) -> bytes:
    """Return a comment, which clients ignore: it keeps the connection open."""
    return f": {text}\n\n".encode()


class EventStream(Response):
    """A response of events, each written as soon as it is available.

    If a client reads slowly, the socket's buffers bound the bytes that wait for it. If it reads nothing for a while,
    `server.Connection` closes the connection.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code, self.background, self._events = 200, None, events
        # nginx buffers responses without this header.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all events."""
        await self._write_events(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})


class LateStream(EventStream):
    """A stream that sends comments while its request waits for its model to be loaded.

    Args:
        comments: yields comments until the request can be handled, or raises the error that prevents it.
        handle: handles the request, and calls its argument with the response, which is an `EventStream`.
        failure: returns the event for an error.
    """

    def __init__(
        self,
        comments: AsyncIterator[bytes],
        handle: Callable[[Callable[[Response], Awaitable[None]]], Awaitable[None]],
        failure: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(comments)
        self._handle, self._failure = handle, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the comments, and then the events of the response, or an event with the error."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.body":  # the response has been started
                await send(message)

        try:
            await self._write_events(send)
            await self._handle(lambda response: response(scope, receive, sent))
        except ClientGoneError:
            raise
        except Exception as error:
            data = self._failure(api_error(error, ""))
            await send({"type": "http.response.body", "body": data, "more_body": False})


def failure_event(path: str, error: ApiError) -> bytes:
    """Return the event for an error, in the form of the API that a path belongs to."""
    if is_of_messages(path):
        return named_event(messages_error(error))
    if path == "/v1/responses":
        found = {"code": error.code, "message": error.message, "param": error.param}
        return named_event({"type": "error", **found, "sequence_number": 0})
    return event(error.body())


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Run work to its end, or cancel it as soon as the client closes its connection.

    Starlette cancels only streamed responses, and only with some servers. The request of a disconnected client would
    otherwise stay in the queue or keep its slot.

    Raises:
        ClientGoneError: the client disconnected first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        ends = await asyncio.gather(task, gone, return_exceptions=True)
        for end in ends:
            if isinstance(end, asyncio.CancelledError):
                forget(end)
        del task, gone, other, ends, end  # an exception's traceback refers to this frame and would keep them alive


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection. A body that is not read is discarded at a bounded rate."""
    while (message := await receive())["type"] != "http.disconnect":
        if message.get("body"):
            await asyncio.sleep(SECONDS_PER_PIECE)
