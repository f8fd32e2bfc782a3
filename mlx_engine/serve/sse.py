"""Server-sent events: their bytes, and a response that writes them as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from anyio import move_on_after
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_engine.serve.errors import ClientGoneError

DONE = b"data: [DONE]\n\n"

# Seconds that a client may leave what it gets unread before it is dropped.
SEND_SECONDS = 30.0


def event(value: object) -> bytes:
    """Return an event whose data is a value as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment, which clients ignore: it keeps the connection open."""
    return f": {text}\n\n".encode()


class EventStream(Response):
    """A response of events. The bytes that wait for a slow reader are bounded by the socket's buffers.

    Args:
        events: bytes to write, each as soon as it is there.
        seconds: how long one write may take.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, seconds: float = SEND_SECONDS) -> None:
        self.status_code, self.background, self._events, self._seconds = 200, None, events, seconds
        # nginx buffers responses unless it is told otherwise.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all events.

        Raises:
            ClientGoneError: the client has not read for too long.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await self._write(send, data, more=True)
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        with move_on_after(self._seconds) as limit:
            await send({"type": "http.response.body", "body": data, "more_body": more})
        if limit.cancelled_caught:
            raise ClientGoneError


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
