"""A proxy that passes bytes on unchanged and keeps them, and the HTTP exchanges that they contain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11


@dataclass(frozen=True)
class Exchange:
    """A request and its response.

    Attributes:
        is_whole: whether the response came to its end. A client that leaves cuts it off.
    """

    method: str
    path: str
    request: bytes
    status: int
    media_type: str
    body: bytes
    is_whole: bool

    @property
    def events(self) -> list[str]:
        """The data of the events of a stream, in full events alone; comments are left out."""
        blocks = self.body.decode("utf-8", "strict" if self.is_whole else "ignore").split("\n\n")[:-1]
        return [block.partition("data: ")[2] for block in blocks if not block.startswith(":")]

    @property
    def value(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Recording:
    """The bytes of a connection in both directions."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def exchanges(self) -> Iterator[Exchange]:
        """Yield the exchanges in their order.

        Raises:
            h11.RemoteProtocolError: the bytes of one side are no HTTP/1.1.
        """
        sent, received = bytes(self.sent), bytes(self.received)
        while sent and received:
            request, request_body, _, sent = _message(h11.Connection(h11.SERVER), sent)
            client = h11.Connection(h11.CLIENT)
            # The length belongs to a body, which this connection does not send.
            headers = [(name, value) for name, value in request.headers if name == b"host"]
            client.send(h11.Request(method=request.method, target=request.target, headers=headers))
            client.send(h11.EndOfMessage())
            response, body, is_whole, received = _message(client, received)
            yield Exchange(
                request.method.decode(),
                urlsplit(request.target.decode()).path,
                request_body,
                response.status_code,
                dict(response.headers).get(b"content-type", b"").decode().partition(";")[0],
                body,
                is_whole,
            )


def _message(connection: h11.Connection, data: bytes) -> tuple[Any, bytes, bool, bytes]:
    """Return the head of a message, its body, whether it has ended, and the bytes after it."""
    connection.receive_data(data)
    head, body = connection.next_event(), bytearray()
    while isinstance(head, h11.InformationalResponse):
        head = connection.next_event()
    assert isinstance(head, h11.Request | h11.Response), f"expected the head of a message, found {head}"
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data
    return head, bytes(body), isinstance(event, h11.EndOfMessage), connection.trailing_data[0]


class Recorder:
    """A proxy in front of a server.

    Attributes:
        url: its address, with a free port.
    """

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self._upstream, self._recordings = urlsplit(upstream), list[Recording]()

    def exchanges(self) -> list[Exchange]:
        """Return what has been recorded."""
        return [exchange for recording in self._recordings for exchange in recording.exchanges()]

    async def serve(self, started: threading.Event) -> None:
        """Pass on connections until `stop`."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        started.set()
        await self._stopped.wait()
        server.close()

    def stop(self) -> None:
        """Close all connections; called by another thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        recording = Recording()
        self._recordings.append(recording)
        ways = [
            asyncio.create_task(_pass_on(reader, upstream, recording.sent)),
            asyncio.create_task(_pass_on(upstream_reader, writer, recording.received)),
        ]
        # A side that has closed ends the connection, so that the server notices a client that leaves.
        with contextlib.suppress(asyncio.CancelledError):  # at the end of the loop
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        upstream.close()
        writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            kept += data
            writer.write(data)
            await writer.drain()


@contextmanager
def recording(upstream: str) -> Iterator[Recorder]:
    """Run a recorder in a thread."""
    recorder, started = Recorder(upstream), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(recorder.serve(started)), name="recorder")
    thread.start()
    started.wait()
    try:
        yield recorder
    finally:
        recorder.stop()
        thread.join()
