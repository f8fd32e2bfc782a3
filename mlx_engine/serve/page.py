"""The routes of the chat page: `/` is the page, and `/events` streams the engine's statuses for the page's live view.

The page is one file, `page.html`. Its Content-Security-Policy allows only the page's own script and style, by their
hashes, and only requests to this server. So texts of models and prompts can neither run scripts nor load data from
other servers.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_engine.serve.errors import ApiError, ClientGoneError
from mlx_engine.serve.sse import EventStream, event, unless_gone
from mlx_engine.serve.status import Status

FILE = Path(__file__).with_name("page.html")
# At least PAUSE seconds pass between two events. After HEARTBEAT seconds without a status, a comment is sent, so that
# proxies do not close the idle connection.
PAUSE, HEARTBEAT = 0.2, 15.0


def routes(
    snapshots: Callable[[bytes], AsyncIterator[Status]],
    *,
    refusal: Callable[[Headers], Response | None] = lambda headers: None,
    pause: float = PAUSE,
    heartbeat: float = HEARTBEAT,
) -> list[Route]:
    """Return the routes of the page.

    `snapshots` gets a query string, which may name a model; it yields the model's latest status, and then newer ones (a
    slow reader misses some). It raises ApiError if there is no such model. `refusal` gets the headers of a request: it
    returns an error response if they lack the API key, otherwise None. `refusal` is called only for `/events`: the page
    itself has no data, and asks the user for the key when a request is answered with 401. At least `pause` seconds pass
    between two events; after `heartbeat` seconds without a status, a comment is sent.
    """
    text = FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text),
        "Cache-Control": "no-store",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    small = gzip.compress(text.encode(), mtime=0)

    def page(request: Request) -> Response:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(small, media_type="text/html", headers={**headers, "Content-Encoding": "gzip"})
        return Response(text, media_type="text/html", headers=headers)

    def events(request: Request) -> Response:
        refused = refusal(request.headers)
        try:
            found = snapshots(request.scope["query_string"])
        except ApiError as error:
            return refused or error.response()
        return refused or UntilGone(statuses(found, pause=pause, heartbeat=heartbeat))

    return [Route("/", page), Route("/events", events)]


def policy(text: str) -> str:
    """Return the Content-Security-Policy of a page with inline scripts and styles."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(text, 'script')}",
            f"style-src {_hashes(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # With these two directives, browsers that support them refuse to parse any text as HTML.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(text: str, tag: str) -> str:
    """Return the hashes of all inline elements with this tag, as sources for the policy."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() for inner in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


async def statuses(snapshots: AsyncIterator[Status], *, pause: float, heartbeat: float) -> AsyncIterator[bytes]:
    """Yield an event for each status that differs from the previous event's, and wait `pause` seconds after each event.

    After each `heartbeat` seconds without a status, yield a comment.
    """
    last = b""
    waiting: asyncio.Task[Status | None] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_next(snapshots))
            await asyncio.wait({waiting}, timeout=heartbeat)
            if not waiting.done():
                yield b":\n\n"
                continue
            status, waiting = waiting.result(), None
            if status is None:
                return
            data = event(status)
            if data != last:
                last = data
                yield data
                await asyncio.sleep(pause)
    finally:
        if waiting is not None:
            waiting.cancel()


async def _next(snapshots: AsyncIterator[Status]) -> Status | None:
    """Return the next status, or None after the last one."""
    return await anext(snapshots, None)


class UntilGone(EventStream):
    """A stream of events that ends when its client disconnects. On other routes, `app.Endpoint` ends the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all events until the client disconnects."""
        with suppress(ClientGoneError):
            await unless_gone(receive, super().__call__(scope, receive, send))
