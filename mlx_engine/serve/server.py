"""The uvicorn server: it listens while the model is loaded, and stops when running answers have ended."""

from __future__ import annotations

import socket
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from mlx_engine.errors import OptionError
from mlx_engine.serve.worker import Worker


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        OptionError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(1024)
    except (OSError, OverflowError) as error:
        why = f"{host}:{port} ({error})"
        raise OptionError(option="--host and --port", expected="a free address of this machine", found=why) from error
    return found


class Server(uvicorn.Server):
    """Runs an application until a signal comes or the engine dies.

    At the first signal new requests are refused with 503, and running answers may take `grace` seconds to end. A second
    signal ends them at once.
    """

    def __init__(self, app: Starlette, worker: Worker, *, grace: float = 30.0) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            # What is left after the grace is cancelled.
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._worker, self._grace = worker, grace
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, and stop at the second."""
        if self._deadline is not None:
            self.should_exit = self.force_exit = True
        self.close()

    def close(self) -> None:
        """Refuse new requests, and stop when the running answers have ended or the grace is over."""
        self._worker.close()
        self._deadline = time.monotonic() + self._grace

    async def on_tick(self, counter: int) -> bool:
        """Check, ten times a second, whether to stop."""
        if self._worker.fault is not None:
            self.should_exit = True
        if self._deadline is not None:
            late = time.monotonic() - self._deadline
            if late >= 0:
                self._worker.abort()
            # Answers that were ended get a second to be written.
            self.should_exit = self.should_exit or not self._worker.n_open or late >= 1
        return await super().on_tick(counter)
