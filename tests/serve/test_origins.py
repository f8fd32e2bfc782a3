"""Web pages of others: what they send is refused on every route, also if DNS says that the server is their own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from mlx_engine.commands.serve import AddressOptions
from mlx_engine.errors import OptionError
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.origins import check_host, check_origin, host_names
from tests.patience import PATIENCE
from tests.serve.served import HTTP, Served, chat_body, request, served
from tests.serve.shapes import Failure, checked

CHAT = "/v1/chat/completions"
GETS = ("/", "/events", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/micro", "/nothing")
POSTS = (CHAT, "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def local() -> Iterator[Served]:
    """A server as `serve` starts it on this machine, with a page of another site that may use it."""
    with served(hosts=AddressOptions().hosts("127.0.0.1"), origins=("https://friend.example",)) as found:
        yield found


def code_of(response: httpx.Response) -> Any:
    assert response.status_code == 403, response.text
    assert "access-control-allow-origin" not in response.headers
    return checked(response.json(), Failure).error.code


@pytest.mark.parametrize(("method", "path"), [*(("GET", path) for path in GETS), *(("POST", path) for path in POSTS)])
def test_no_route_serves_a_host_or_a_web_page_of_others(local: Served, method: str, path: str):
    for headers, code in [
        ({"Host": "evil.example"}, "host_not_allowed"),
        ({"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}, "host_not_allowed"),
        ({"Origin": "https://evil.example"}, "origin_not_allowed"),
        ({"Origin": "null"}, "origin_not_allowed"),
        ({"Origin": "http://localhost:1"}, "origin_not_allowed"),
    ]:
        response = HTTP.request(
            method, local.url + path, headers=headers, json=chat_body() if method == "POST" else None
        )
        assert code_of(response) == code


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_a_body_that_any_web_page_can_send_is_refused(local: Served, kind: str | None):
    """These content types need no preflight, and old browsers send no Origin with them."""
    body = json.dumps(chat_body()).encode()
    for path in POSTS:
        response = HTTP.post(local.url + path, content=body, headers={} if kind is None else {"Content-Type": kind})
        assert code_of(response) == "unsupported_media_type"
    evil = HTTP.post(
        local.url + CHAT, content=body, headers={"Origin": "https://evil.example", "Content-Type": "text/plain"}
    )
    assert code_of(evil) == "origin_not_allowed"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_json_is_served(local: Served, kind: str):
    response = HTTP.post(local.url + CHAT, content=json.dumps(chat_body(max_tokens=1)), headers={"Content-Type": kind})
    assert response.status_code == 200


def test_preflights(local: Served):
    def preflight(origin: str) -> httpx.Response:
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        return HTTP.options(local.url + CHAT, headers=headers)

    assert code_of(preflight("https://evil.example")) == "origin_not_allowed"
    allowed = preflight("https://friend.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://friend.example"


def test_the_pages_that_may_use_the_server(local: Served):
    """Its own page, which sends its Origin, and those of --cors."""
    port = local.address[1]
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "localhost."):
        headers = {"Host": f"{host}:{port}", "Origin": f"http://{host}:{port}"}
        assert local.post(CHAT, chat_body(max_tokens=1), headers=headers).status_code == 200
    friend = local.post(CHAT, chat_body(max_tokens=1), headers={"Origin": "https://friend.example"})
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    with served(origins=("*",)) as open_to_all:
        reply = open_to_all.post(CHAT, chat_body(max_tokens=1), headers={"Origin": "https://evil.example"})
        assert reply.headers["access-control-allow-origin"] == "*"


def test_refusals_are_counted_and_cost_nothing(local: Served):
    before = local.scheduler.prefix.stats.queries if local.scheduler.prefix else 0
    HTTP.post(local.url + CHAT, json=chat_body(), headers={"Host": "evil.example"})
    assert 'http_errors_total{status="403"}' in HTTP.get(local.url + "/metrics").text
    assert local.scheduler.prefix is not None
    assert local.scheduler.prefix.stats.queries == before


def raw(server: Served, data: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", 403),
        (b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: \r\n\r\n", 403),
        (b"GET /health HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", 403),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\n\r\n", 403),
    ],
    ids=["1.0 without host", "1.0", "two hosts", "empty", "user", "target", "target of others", "forwarded"],
)
def test_hosts_on_the_wire(local: Served, data: bytes, status: int):
    data = data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n")
    assert raw(local, data).startswith(b"HTTP/1.1 %d" % status)


def test_a_slash_too_many_is_no_redirect_to_the_host_of_the_request(local: Served):
    with served() as anywhere:
        response = HTTP.get(anywhere.url + "/health/", headers={"Host": "evil.example"})
    assert (response.status_code, response.headers.get("location")) == (404, None)
    assert HTTP.get(local.url + "/v1/models/").status_code == 404


def is_allowed(host: str, hosts: frozenset[str] | None) -> bool:
    try:
        check_host(Headers({"host": host}), hosts)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:8080", "[0:0::1]", "LOCALHOST.:99", "localhost:"])
def test_hosts_of_this_machine(host: str):
    assert is_allowed(host, AddressOptions().hosts("127.0.0.1"))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "127.0.0.2", "[::2]", "::1", "[::1", "localhost]",
     "localhost:x", "localhost:123456", "localhost/", "localhost#", "a@localhost", "localhost:80@evil",
     "localhost evil", "", ":80", "localhost\\", "0x7f.1", "locälhost", "localhost..", "[127.0.0.1]", "[localhost]"],
)  # fmt: skip
def test_hosts_of_others(host: str):
    assert not is_allowed(host, AddressOptions().hosts("127.0.0.1"))


def test_hosts_of_a_server():
    named = AddressOptions(host="Mac.local", allow_host=["llm.example", "[fe80::1]"]).hosts("127.0.1.1")
    for host in ("mac.local:8080", "127.0.1.1:8080", "llm.example", "LLM.example.", "[fe80::1]:80", "localhost"):
        assert is_allowed(host, named)
    assert not is_allowed("www.llm.example", named)
    # On other addresses clients may use any name, unless some are given.
    assert AddressOptions(host="0.0.0.0").hosts("0.0.0.0") is None
    assert is_allowed("anything", None)
    some = AddressOptions(host="0.0.0.0", allow_host=["box"]).hosts("0.0.0.0")
    assert (is_allowed("box:8080", some), is_allowed("evil.example", some)) == (True, False)


def test_a_name_that_is_no_host_is_refused():
    for name in ("https://a", "a:80", "a/b", "", "*"):
        with pytest.raises(OptionError, match="--allow-host must be a host name"):
            AddressOptions(allow_host=[name]).check()
    AddressOptions(allow_host=["a", "b.example", "10.0.0.1", "[::1]", "::1"]).check()


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://llm.example", "llm.example", True),
        ("https://llm.example", "llm.example:443", True),  # TLS ends at a proxy
        ("https://llm.example:8443", "llm.example:8443", True),
        ("http://[::1]:8080", "[::1]:8080", True),
        ("https://llm.example", "llm.example:8080", False),
        ("http://llm.example:81", "llm.example", False),
        ("null", "null", False),
        ("http://", "", False),
        ("file://", "localhost", False),
        ("http://evil.example#llm.example", "llm.example", False),
        ("http://llm.example@evil.example", "llm.example", False),
    ],
)
def test_origins(origin: str, host: str, is_own: bool):
    headers = Headers({"origin": origin, "host": host})
    if is_own:
        check_origin(headers, ())
    else:
        with pytest.raises(ApiError):
            check_origin(headers, ())
        check_origin(headers, (origin,))


def test_every_origin_of_a_request_is_checked():
    headers = Headers(raw=[(b"host", b"a"), (b"origin", b"http://a"), (b"origin", b"https://evil.example")])
    with pytest.raises(ApiError, match="evil"):
        check_origin(headers, ())


def test_names_are_compared_in_one_form():
    assert host_names(["LocalHost", "[::1]", "0:0:0:0:0:0:0:1", "a.", "not a host"]) == {"localhost", "::1", "a"}


def test_requests_of_a_kept_connection_are_checked_one_by_one(local: Served):
    evil = b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    found = raw(local, request(CHAT, chat_body(max_tokens=1)) + evil + last)
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"403", b"200"]
