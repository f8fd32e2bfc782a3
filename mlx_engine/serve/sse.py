"""Server-sent events: their bytes, a response that streams them, and clients that disconnect meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_engine.serve.errors import ClientGoneError, forget
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

    The socket's buffers limit the bytes that wait for a slow reader; `Connection` limits the time.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code, self.background, self._events = 200, None, events
        # nginx buffers responses without this header.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all events."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Run work to its end, and cancel it as soon as the client closes its connection.

    Starlette cancels only streams, and only with some servers. A client that waits for a reply, in the queue or during
    prefill, would keep its slot after it has left.

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
        del task, gone, other, ends, end  # an exception refers to this frame


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection. A body that is not read is discarded at a bounded rate."""
    while (message := await receive())["type"] != "http.disconnect":
        if message.get("body"):
            await asyncio.sleep(SECONDS_PER_PIECE)
