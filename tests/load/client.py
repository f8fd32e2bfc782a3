"""A client over a plain socket, which may leave at any moment by closing it or by closing its sending direction."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.load.mix import Asked, Leave


@dataclass
class Result:
    """What a client has got.

    Attributes:
        status: the HTTP status; None if it left before there was one.
        has_left: whether it left before the end.
        digests: the digests of all answers, if the reply is complete.
        retry_after: the seconds after which it may ask again.
        failure: what should not have happened.
    """

    status: int | None = None
    has_left: bool = False
    digests: list[str] = field(default_factory=list)
    retry_after: float = 0.0
    failure: str = ""


async def ask(address: tuple[str, int], asked: Asked, seconds: float) -> Result:
    """Send a request and read its reply, all within so many seconds."""
    result = Result()
    try:
        await asyncio.wait_for(_ask(address, asked, result), seconds)
    except asyncio.TimeoutError:
        result.failure = f"no end after {seconds:g} seconds"
    except (OSError, EOFError, ValueError, KeyError) as error:
        result.failure = f"{type(error).__name__}: {error}"
    return result


async def _ask(address: tuple[str, int], asked: Asked, result: Result) -> None:
    reader, writer = await asyncio.open_connection(*address)
    data, leave = _request(asked), asked.leave
    try:
        if leave is not None and leave.after != "events":
            writer.write(data[: len(data) // 2] if leave.after == "part" else data)
            await asyncio.sleep(leave.n if leave.after == "seconds" else 0)
            await _leave(reader, writer, leave, result)
            return
        writer.write(data)
        headers = await _head(reader, result)
        if "text/event-stream" in headers["content-type"]:
            await _stream(reader, writer, leave, result)
        else:
            _read_reply(await reader.readexactly(int(headers["content-length"])), result)
        result.retry_after = float(headers.get("retry-after", 0))
    finally:
        writer.close()


def _request(asked: Asked) -> bytes:
    data = json.dumps(asked.body).encode()
    head = f"POST {asked.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, leave: Leave, result: Result) -> None:
    """Leave; a client that has closed one direction waits until the server closes the other."""
    result.has_left = True
    if leave.half:
        writer.write_eof()
        await reader.read()


async def _head(reader: asyncio.StreamReader, result: Result) -> dict[str, str]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    result.status = int(lines[0].split()[1])
    return dict(line.lower().split(": ", 1) for line in lines[1:] if line)


def _read_reply(body: bytes, result: Result) -> None:
    reply = json.loads(body)
    if result.status == 200:
        result.digests = reply["mlx_engine"]["digests"]
    elif not reply["error"]["message"]:
        result.failure = "an error without a message"


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, leave: Leave | None, result: Result
) -> None:
    """Read the events of a chunked reply; leave after so many of them, if the client leaves."""
    n_events, last, rest = 0, "", b""
    while size := int(await reader.readline(), 16):
        *blocks, rest = (rest + await reader.readexactly(size)).split(b"\n\n")
        await reader.readexactly(2)
        for block in blocks:
            data = block.decode()
            n_events += data.startswith("data: ")
            if data.startswith("data: {"):
                last = data
        if leave is not None and n_events >= leave.n:
            await _leave(reader, writer, leave, result)
            return
    found: dict[str, Any] = json.loads(last.removeprefix("data: "))
    if "error" in found:
        result.failure = f"an error in the stream: {found['error']}"
    else:
        result.digests = found["mlx_engine"]["digests"]
