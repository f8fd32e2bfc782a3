"""The page and its events: what the file may contain, its headers, when events are sent, and when they end."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from mlx_engine.serve.page import FILE, routes, statuses
from mlx_engine.serve.status import Status
from tests.patience import PATIENCE

TEXT = FILE.read_text(encoding="utf-8")
SVG = "http://www.w3.org/2000/svg"
NO_STATUS = Status(1, 64, (), (), 0, (), None, (), 0)


class Tags(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(TEXT)
    return parser.tags


class Source:
    """Yields statuses with the given numbers of steps, with pauses in seconds before them."""

    def __init__(self, *given: tuple[float, int]) -> None:
        self.given, self.is_open = given, False
        self.holds: dict[int, asyncio.Event] = {}  # each of these statuses waits for its event

    async def snapshots(self) -> AsyncIterator[Status]:
        self.is_open = True
        try:
            for seconds, n_steps in self.given:
                await asyncio.sleep(seconds)
                if n_steps in self.holds:
                    await self.holds[n_steps].wait()
                yield Status(1, 64, (), (), 0, (), None, (), n_steps)
        finally:
            self.is_open = False


async def get(
    source: Source,
    path: str,
    receive: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    accept: bytes = b"identity",
    **options: Any,
) -> tuple[int, dict[str, str], bytes]:
    """Send a request, as a server does that announces a version in which Starlette does not listen for the client."""
    sent: list[dict[str, Any]] = options.pop("sent", [])

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    async def wait() -> dict[str, Any]:
        await asyncio.sleep(2 * PATIENCE)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET", "path": path}
    scope["headers"] = [(b"accept-encoding", accept)]
    app = Starlette(routes=routes(lambda query: source.snapshots(), **options))
    await app({**scope, "query_string": b"", "http_version": "1.1"}, receive or wait, keep)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


def test_the_page_is_sent_as_it_is():
    status, headers, body = asyncio.run(get(Source(), "/"))
    assert (status, body) == (200, TEXT.encode())
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["cache-control"] == "no-store"


def test_the_page_is_compressed_for_clients_that_say_so():
    status, headers, body = asyncio.run(get(Source(), "/", accept=b"br, gzip"))
    assert (status, gzip.decompress(body)) == (200, TEXT.encode())
    assert (headers["content-encoding"], headers["vary"]) == ("gzip", "Accept-Encoding")
    assert len(body) < len(TEXT) / 3


def test_the_policy_allows_the_own_script_and_style_by_hash_and_nothing_from_outside():
    _, headers, _ = asyncio.run(get(Source(), "/"))
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        inner = TEXT.split(f"<{tag}>")[1].split(f"</{tag}>")[0].encode()
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(inner).digest()).decode()}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert (policy["connect-src"], policy["trusted-types"]) == ("'self'", "'none'")
    assert "unsafe" not in headers["content-security-policy"]


def test_the_file_loads_nothing(tags: list[tuple[str, dict[str, str | None]]]):
    addresses = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(address and address.startswith(("#", "data:,")) for address in addresses)
    assert set(re.findall(r"https?:[^\"'\s]*", TEXT)) == {SVG}
    assert re.findall(r"\burl\(|@import|importScripts|\bimport\s*\(|^\s*import\b", TEXT, re.MULTILINE) == []
    assert [tag for tag, _ in tags].count("script") == [tag for tag, _ in tags].count("style") == 1


def test_no_text_becomes_markup_or_code_and_no_key_is_stored(tags: list[tuple[str, dict[str, str | None]]]):
    names = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bFunction\(|DOMParser|srcdoc|Unsafe"
    assert re.findall(names, TEXT) == []
    assert re.findall(r"sessionStorage|indexedDB|cookie", TEXT) == []
    assert re.findall(r"^.*\bsetItem\b.*$", TEXT, re.MULTILINE) == [
        "    localStorage.setItem(PREFIX + name, JSON.stringify(value));"
    ]
    assert re.findall(r"\bkeep\(([^)]*)", TEXT) == ['"ui", ui', "name, value", "`c.${conversation.id}`, conversation"]
    assert [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"] == []


def test_everything_has_a_name(tags: list[tuple[str, dict[str, str | None]]]):
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["for"] for tag, attributes in tags if tag == "label"}
    assert labels == {attributes["id"] for tag, attributes in tags if tag in ("input", "textarea", "select")}
    names = ("aria-labelledby", "aria-describedby", "aria-controls")
    references = {one for _, a in tags for name in names for one in (a.get(name) or "").split()}
    assert references <= set(ids)
    assert {"html", "header", "nav", "main", "section", "h1"} <= {tag for tag, _ in tags}
    assert ("html", {"lang": "en"}) in tags


def test_the_script_uses_ids_that_exist(tags: list[tuple[str, dict[str, str | None]]]):
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    used = set(re.findall(r"\$\(\"([\w-]+)\"\)", TEXT))
    assert len(used) > 20
    assert used <= ids


def test_the_lines_stay_readable():
    assert max(map(len, TEXT.splitlines())) <= 150


async def collect(source: Source, n: int, *, pause: float = 0.0, heartbeat: float = 9.0) -> list[bytes]:
    """Return the first n events, and close the stream."""
    stream, found = statuses(source.snapshots(), pause=pause, heartbeat=heartbeat), []
    async for event in stream:
        found.append(event)
        if len(found) == n:
            break
    await stream.aclose()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return found


def numbers(events: list[bytes]) -> list[int | None]:
    """The number of steps of each event, None for a comment."""
    found = [re.search(rb'"n_steps":(\d+)', event) for event in events]
    return [int(match[1]) if match else None for match in found]


def test_an_event_is_a_status_as_json_and_a_status_is_sent_once():
    events = asyncio.run(collect(Source((0, 1), (0, 1), (0, 2), (0, 2), (0, 1)), 9))
    assert numbers(events) == [1, 2, 1]
    assert all(event.startswith(b'data: {"slots":1,') and event.endswith(b"}\n\n") for event in events)
    assert all(event.count(b"\n") == 2 for event in events)


def test_comments_keep_a_silent_connection_open_and_no_status_is_lost():
    async def run() -> list[bytes]:
        source = Source((0, 1), (0, 2))
        source.holds = {2: asyncio.Event()}
        found: list[bytes] = []
        async for event in statuses(source.snapshots(), pause=0.0, heartbeat=0.01):
            found.append(event)
            if found[1:] == [b":\n\n"] * 2:
                source.holds[2].set()
        return found

    found = numbers(asyncio.run(asyncio.wait_for(run(), PATIENCE)))
    assert found[:3] == [1, None, None]
    assert [n for n in found if n is not None] == [1, 2]


def test_statuses_have_a_pause_between_them():
    start = time.perf_counter()
    asyncio.run(collect(Source((0, 1), (0, 2), (0, 3)), 3, pause=0.05))
    assert time.perf_counter() - start >= 0.1


def test_a_stream_that_is_closed_leaves_its_source():
    source = Source((0, 1), (2 * PATIENCE, 2))

    async def run() -> bool:
        assert numbers(await collect(source, 2, heartbeat=0.01)) == [1, None]
        return source.is_open

    assert asyncio.run(run()) is False


def test_events_end_when_the_client_leaves():
    source, sent = Source((0, 1), (2 * PATIENCE, 2)), list[dict[str, Any]]()

    async def leave() -> dict[str, Any]:
        while not any(message.get("body") for message in sent):
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def run() -> tuple[int, dict[str, str], bytes]:
        return await asyncio.wait_for(get(source, "/events", leave, sent=sent), PATIENCE)

    status, headers, body = asyncio.run(run())
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["cache-control"] == "no-store"
    assert "content-length" not in headers
    assert numbers([body]) == [1]
    assert source.is_open is False


def test_events_end_with_their_source():
    _, _, body = asyncio.run(asyncio.wait_for(get(Source((0, 1)), "/events"), PATIENCE))
    assert body.startswith(b"data: {")


def test_events_can_be_refused_and_the_page_cannot():
    source = Source((0, 1))
    refusal = {"refusal": lambda headers: Response(status_code=401) if "authorization" not in headers else None}
    status, _, body = asyncio.run(get(source, "/events", **refusal))
    assert (status, body) == (401, b"")
    status, _, _ = asyncio.run(get(source, "/", **refusal))
    assert status == 200
