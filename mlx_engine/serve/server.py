"""The uvicorn server, with limits on its connections.

uvicorn waits without a limit for the headers of a request, and for a client that does not read its reply. Such
connections would occupy file descriptors, so this module closes them. uvicorn also accepts connections until no file
descriptor is left, and then fails; so this module limits the number of connections.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_engine.errors import AddressInUseError, OptionError
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.registry import Models

# The most bytes of data that h11 gets at once. After each piece, h11 refuses headers that are still incomplete and have
# more than 16 KiB. It does not check the size of complete headers, so larger pieces would let larger headers pass.
PIECE = 1 << 14

# The most bytes of a body that are read at once. Larger reads are faster, because the event loop waits for the GIL
# after each read. The first read of a request is at most PIECE bytes, so that many new requests do not occupy the loop
# for long.
LARGE_READ = 1 << 18

# Seconds from the refusal of a request until its connection is closed. Until then, incoming data is read and discarded:
# if a socket is closed while it has unread data, the system also discards the reply.
LINGER_SECONDS = 2.0

CODES = {408: "request_timeout", 431: "headers_too_large"}

LOGGER = logging.getLogger("mlx_engine.serve")

# The most connections. Each takes 6 KB, and time for `Connection.check`, which is called ten times a second.
MOST_CONNECTIONS = 4096
# The most connections that asyncio accepts in one iteration of its loop, before it runs other callbacks.
ACCEPTED_AT_ONCE = 16
# File descriptors that are reserved for files, pipes, and connections that are being accepted or closed.
SPARE_DESCRIPTORS = 128
# The largest limit on file descriptors that macOS accepts, even if it reports that there is no limit.
OPEN_MAX = 10240
# Seconds between two lines of the log about closed connections.
LOG_SECONDS = 60.0


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as the system allows, up to 1,048,576."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20), OPEN_MAX):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return


def most_connections() -> int:
    """Return how many connections the server may have without running out of file descriptors; at least 1."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    n_open = sum(1 for _ in Path("/dev/fd").iterdir())
    return max(1, min(limit - n_open - SPARE_DESCRIPTORS, MOST_CONNECTIONS))


class Patience(NamedTuple):
    """The number of seconds that the server waits for a client before it closes the connection.

    Attributes:
        head: from the start of the connection, or the end of a reply, until all headers of the next request arrive.
        read: while the client reads nothing of its reply.
    """

    head: float = 60.0
    read: float = 30.0


PATIENCE = Patience()


class ConnectionLimit:
    """Limits connections to `most` by closing idle ones. A connection is idle while it has no request."""

    def __init__(self, most: int = MOST_CONNECTIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._n_closed, self._logged_at = 0, -LOG_SECONDS

    def add(self, connection: Connection, n_open: int) -> None:
        """Record that a connection is idle. If `n_open` exceeds the limit, close the longest idle connection."""
        self._idle[connection] = None
        if n_open <= self._most:
            return
        oldest = next(iter(self._idle))
        self.remove(oldest)
        oldest.transport.abort()
        self._n_closed += 1
        if self._clock() - self._logged_at >= LOG_SECONDS:
            LOGGER.warning(
                f"more than {self._most:,} connections; closed the oldest idle ones "
                f"({self._n_closed:,} since the last such line; at most one such line is logged per minute)"
            )
            self._n_closed, self._logged_at = 0, self._clock()

    def remove(self, connection: Connection) -> None:
        """Record that a connection is no longer idle, or is closed."""
        self._idle.pop(connection, None)


class Connection(H11Protocol):
    """A connection. The server calls `check` ten times a second to close the connections of slow clients."""

    def __init__(self, *given: Any, limit: ConnectionLimit, **named: Any) -> None:
        super().__init__(*given, **named)
        self._limit = limit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.max_size = PIECE  # type: ignore[attr-defined]
        self._waits_since = self._moved_at = self.loop.time()
        self._n_unsent = 0
        self._refused_at: float | None = None
        self._limit.add(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the idle ones."""
        self._limit.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._waits_since = self.loop.time()
        self.transport.max_size = PIECE  # type: ignore[attr-defined]
        if not self.transport.is_closing():
            self._limit.add(self, len(self.connections))
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse data in pieces of PIECE bytes; discard data after a refused request."""
        for start in range(0, len(data), PIECE):
            if self._refused_at is None:
                super().data_received(data[start : start + PIECE])
        cycle = self.cycle
        if cycle is not None and cycle.body and cycle.more_body and not cycle.response_complete:
            # The rest of the body is read when the application receives it, see `limits.Bodies`.
            self.flow.pause_reading()
            self.transport.max_size = LARGE_READ  # type: ignore[attr-defined]

    def handle_events(self) -> None:
        """Parse the data that has arrived. If a request has begun, the connection is no longer idle."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._limit.remove(self)

    def check(self, patience: Patience) -> None:
        """Close the connection if the client is slower than `patience`, or LINGER_SECONDS after a refused request."""
        now, n_unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if not n_unsent or n_unsent < self._n_unsent:
            self._moved_at = now
        self._n_unsent = n_unsent
        lingers = self._refused_at is not None and now - self._refused_at > LINGER_SECONDS
        if lingers or now - self._moved_at > patience.read:
            self.transport.abort()
        elif self._waits_for_head and now - self._waits_since > patience.head:
            if self.conn.trailing_data[0]:
                self._refuse(408, f"only a part of the headers arrived within {patience.head:g} seconds")
            else:
                self.transport.close()

    @property
    def _waits_for_head(self) -> bool:
        return self._refused_at is None and (self.cycle is None or self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse; called while h11's error is handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        what = str(error).partition(":")[0]  # the message without the bytes of the request
        self._refuse(status, f"not HTTP/1.1, or its headers are too large ({what})")

    def _refuse(self, status: int, why: str) -> None:
        """Reply with an error in OpenAI's form; `check` closes the connection after LINGER_SECONDS.

        If another reply has begun or the connection is closing, close the connection at once.
        """
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


# The number of connections that the system queues until they are accepted.
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free port.

    Raises:
        OptionError: the server cannot listen on the address.
        AddressInUseError: another program listens on the address.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, proto))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
            stack.pop_all()
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError(host=host, port=port) from error
        message = f"cannot listen on {host}:{port}: {error}; choose others with --host and --port"
        raise OptionError(message, option="--host", found=f"{host}:{port}") from error
    return found


class Server(uvicorn.Server):
    """Runs an application until the process gets a signal, or the engine thread of the only model dies.

    The server accepts connections even before its models have been loaded.

    At the first signal (Ctrl-C), new requests are refused with 503, and running answers may take `grace` seconds to
    end. At a second signal, running answers end at once, and their clients get an error.
    """

    def __init__(
        self,
        app: Starlette,
        models: Models,
        *,
        grace: float = 30.0,
        patience: Patience = PATIENCE,
        limit: ConnectionLimit | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(Connection, limit=limit or ConnectionLimit()),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            # uvicorn's default, 5 seconds, is too short: some clients keep an idle connection for the same time, and
            # might send their next request just when the server closes the connection.
            timeout_keep_alive=math.ceil(patience.head),
            # Seconds from the stop in `on_tick` until uvicorn cancels all requests that have not ended.
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._models, self._grace, self._patience = models, grace, patience
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and raise the backlog of its sockets to BACKLOG; uvicorn has set it to ACCEPTED_AT_ONCE."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, and stop at the second."""
        self.close(None if self._deadline is None else 0.0)

    def close(self, grace: float | None = None) -> None:
        """Refuse new requests, and stop when the running answers have ended, at the latest after `grace` seconds."""
        self._models.close()
        self._deadline = time.monotonic() + (self._grace if grace is None else grace)

    async def on_tick(self, counter: int) -> bool:
        """Unload idle models, close slow connections, and decide whether to stop; uvicorn calls this every 0.1 s."""
        self._models.tick()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.check(self._patience)
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if is_late and self._models.n_open:
            self._models.end_calls(ApiError(503, "the server is shutting down", code="closing"))
        if self._models.fault is not None or is_late or (self._deadline is not None and not self._models.n_open):
            self.should_exit = True
        return await super().on_tick(counter)
