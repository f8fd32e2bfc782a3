"""A connection of the server: HTTP/1.1 as uvicorn has it, and limits on how long a client may make the server wait.

uvicorn waits without an end for the head of a request, and for a client that does not read its reply. Each such client
would keep a file descriptor.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_engine.serve.errors import ApiError

# h11 compares an incomplete head with its bound, 16 KiB, after each piece of data. The size of the pieces is fixed
# here, so that it does not depend on the network whether a head is refused.
PIECE = 1 << 14

# Bytes that are read at once: PIECE of a new request, so that many connections together take little time, and this of
# a body. After each read the loop waits for Python's global lock, so that many small ones take longer.
LARGE_READ = 1 << 18

# Seconds that a refused client has to read why: data that is unread when a socket is closed discards the reply.
LINGER_SECONDS = 2.0

CODES = {408: "request_timeout", 431: "headers_too_large"}


class Patience(NamedTuple):
    """How many seconds the server waits for a client.

    Attributes:
        head: for all headers of a request, after the connection was made or the last reply was sent.
        read: for a client that reads nothing of what has been written.
    """

    head: float = 60.0
    read: float = 30.0


PATIENCE = Patience()


class Connection(H11Protocol):
    """A connection. The server calls `check` several times a second."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.max_size = PIECE  # type: ignore[attr-defined]
        self._waits_since = self._moved_at = self.loop.time()
        self._n_unsent = 0
        self._refused_at: float | None = None

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._waits_since = self.loop.time()
        self.transport.max_size = PIECE  # type: ignore[attr-defined]
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse data in pieces of fixed size; discard what follows a refused request."""
        for start in range(0, len(data), PIECE):
            if self._refused_at is None:
                super().data_received(data[start : start + PIECE])
        cycle = self.cycle
        if cycle is not None and cycle.body and cycle.more_body and not cycle.response_complete:
            # What follows is read when the body is asked for, see `Bodies`.
            self.flow.pause_reading()
            self.transport.max_size = LARGE_READ  # type: ignore[attr-defined]

    def check(self, patience: Patience) -> None:
        """Close the connection if the client has made the server wait for too long."""
        now, n_unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if not n_unsent or n_unsent < self._n_unsent:
            self._moved_at = now
        self._n_unsent = n_unsent
        lingers = self._refused_at is not None and now - self._refused_at > LINGER_SECONDS
        if lingers or now - self._moved_at > patience.read:
            self.transport.abort()
        elif self._waits_for_head and now - self._waits_since > patience.head:
            if self.conn.trailing_data[0]:
                self._refuse(408, f"expected all headers within {patience.head:g} seconds, found a part of them")
            else:
                self.transport.close()

    @property
    def _waits_for_head(self) -> bool:
        return self._refused_at is None and (self.cycle is None or self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot parse; called while its error is handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        what = str(error).partition(":")[0]  # without the bytes of the request
        self._refuse(status, f"expected HTTP/1.1 with a short head, found another ({what})")

    def _refuse(self, status: int, why: str) -> None:
        """Reply with an error in the form of the API, and close the connection when the client has had time to read."""
        self._refused_at = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self.flow.resume_reading()
        message = f"the request: {why}; correct it and send it again"
        error = ApiError(status, message, code=CODES.get(status, "invalid_http"))
        body = msgspec.json.encode(error.body())
        phrase = HTTPStatus(status).phrase.encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=status, headers=headers, reason=phrase)
        events: list[Any] = [response, h11.Data(data=body), h11.EndOfMessage()]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
