"""Server-sent events (SSE): encode them, stream them in responses, and cancel work when the client disconnects."""

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
    """Return a comment. Clients ignore comments, but the data keeps the connection open."""
    return f": {text}\n\n".encode()


class EventStream(Response):
    """A response of events, each written as soon as it is available.

    If a client reads slowly, `send` waits while the buffer of the connection is full, so unsent data takes little
    memory. If the client reads nothing for a while, `server.Connection` closes the connection.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code, self.background, self._events = 200, None, events
        # X-Accel-Buffering keeps nginx from buffering the response.
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
    """A stream that sends comments until the model of its request is loaded, and then the events of the response.

    Args:
        comments: yields comments until the model can be used; raises an error if the model cannot be loaded.
        handle: handles the request. Its argument is a function that sends a response; `handle` calls this function with
            an `EventStream`.
        failure: returns the event that reports an error.
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
            # Leave out the start of the response: a start has already been sent, before the comments.
            if message["type"] == "http.response.body":
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
    """Return the event that reports an error, in the form of the API to which the route `path` belongs."""
    if is_of_messages(path):
        return named_event(messages_error(error))
    if path == "/v1/responses":
        found = {"code": error.code, "message": error.message, "param": error.param}
        return named_event({"type": "error", **found, "sequence_number": 0})
    return event(error.body())


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Run work to its end, but cancel the work if the client closes its connection first.

    Starlette itself cancels only streamed responses, and only if the server's ASGI version is below 2.4. Without this
    function, the request of a disconnected client would stay in the queue, or keep its slot.

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
        del task, gone, other, ends, end  # a traceback that refers to this frame would keep these objects alive


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection. Discard the unread rest of the body, at a bounded rate."""
    while (message := await receive())["type"] != "http.disconnect":
        if message.get("body"):
            await asyncio.sleep(SECONDS_PER_PIECE)
