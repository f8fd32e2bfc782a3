"""The uvicorn server: it listens while the model is loaded, and stops when running answers have ended."""

from __future__ import annotations

import errno
import math
import socket
import time
from contextlib import ExitStack
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from mlx_engine.errors import AddressInUseError, OptionError
from mlx_engine.serve.connection import ACCEPTED_AT_ONCE, PATIENCE, Connection, ConnectionLimit, Patience
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.worker import Worker

# Connections that the system keeps until they are accepted.
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        OptionError: the address is none of this machine.
        AddressInUseError: another program listens there.
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
        message = f"{host}:{port} is no address of this machine: {error}; choose others with --host and --port"
        raise OptionError(message, option="--host", found=f"{host}:{port}") from error
    return found


class Server(uvicorn.Server):
    """Runs an application until a signal comes or the engine dies.

    At the first signal new requests are refused with 503, and running answers may take `grace` seconds to end. A second
    signal ends them at once: their clients get an error.

    Args:
        app: the application.
        worker: the engine thread.
        grace: seconds.
        patience: how long the server waits for its clients.
        limit: the most connections, and the idle ones.
    """

    def __init__(
        self,
        app: Starlette,
        worker: Worker,
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
            # Clients drop idle connections too, some of them after 5 seconds, uvicorn's default: their next request
            # would meet the end of the connection.
            timeout_keep_alive=math.ceil(patience.head),
            # What is left after the grace is cancelled.
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._worker, self._grace, self._patience = worker, grace, patience
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and let the system keep more connections than are accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, and stop at the second."""
        self.close(None if self._deadline is None else 0.0)

    def close(self, grace: float | None = None) -> None:
        """Refuse new requests, and stop when the running answers have ended or the grace, in seconds, is over."""
        self._worker.close()
        self._deadline = time.monotonic() + (self._grace if grace is None else grace)

    async def on_tick(self, counter: int) -> bool:
        """Check, ten times a second, the connections and whether to stop."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.check(self._patience)
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if is_late and self._worker.n_open:
            message = "the server: expected time to end this answer, found that it stops; send the request again later"
            self._worker.end_jobs(ApiError(503, message, code="closing"))
        if self._worker.fault is not None or is_late or (self._deadline is not None and not self._worker.n_open):
            self.should_exit = True
        return await super().on_tick(counter)
