"""Accept or refuse requests by their headers Host, Origin and Content-Type.

Any web page can make the browser send requests to a server on the user's machine. Three checks refuse such requests:

- Origin: browsers add this header to all requests except some GET requests. A request with another page's origin is
  refused. This includes preflight requests, with which a browser asks whether the page may send a request.
- Content-Type: without a preflight request, a page can send a body as plain text, but not as JSON. So the body of every
  POST request must be declared as JSON.
- Host: if a GET request has no Origin, a page can read the reply only by DNS rebinding: the attacker changes the DNS
  entry of the page's host to the server's address, so that the browser treats page and server as one site. The header
  Host then has the name of the page's host, which is no name of this server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_engine.serve.errors import ApiError, cut
from mlx_engine.serve.prometheus import Counter

# A host (an IPv6 address in brackets, a name or an IPv4 address) and an optional port.
HOST = re.compile(r"(\[[^\]]*:[^\]]*\]|[^:\[\]]+)(?::([0-9]{0,5}))?")
# A valid host name, or an IPv4 address.
NAME = re.compile(r"[a-zA-Z0-9_.-]+")
PORTS = {"http": "80", "https": "443"}

# The names of this machine for clients that run on it.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def host_name(text: str) -> str | None:
    """Return a host in lower case, without brackets and final dot; None for any other text, such as HOST:PORT."""
    if ":" in text:
        try:
            return str(ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]")))
        except ValueError:
            return None
    return text.lower().removesuffix(".") if NAME.fullmatch(text) else None


def host_names(names: Iterable[str]) -> frozenset[str]:
    """Return the hosts as `host_name` writes them, without invalid names."""
    return frozenset(name for name in map(host_name, names) if name is not None)


def _parsed(host: str) -> tuple[str, str] | None:
    """Return the host and the port ("" if there is none) of HOST or HOST:PORT; None if the text is invalid."""
    match = HOST.fullmatch(host)
    name = None if match is None else host_name(match[1])
    return None if match is None or name is None else (name, match[2] or "")


def check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Check that the header Host has one of `hosts`, with any port. If `hosts` is None, every request passes.

    Raises:
        ApiError: the request has another Host, no Host or several.
    """
    if hosts is None:
        return
    given = headers.getlist("host")
    parsed = _parsed(given[0]) if len(given) == 1 else None
    if parsed is None or parsed[0] not in hosts:
        name = parsed[0] if parsed else "NAME"
        message = (
            f"the header Host, {cut(', '.join(given)) or 'none'!r}, is no name of this server; use the server's "
            f"address, or start the server with --allow-host {cut(name)} if it has this name"
        )
        raise ApiError(403, message, code="host_not_allowed")


def check_origin(headers: Headers, origins: Collection[str]) -> None:
    """Check that a request with a header Origin comes from this server's own page, or from a page in `origins`.

    Raises:
        ApiError: the request comes from another web page.
    """
    for origin in headers.getlist("origin"):
        if "*" not in origins and origin not in origins and not _is_own(origin, headers.get("host", "")):
            message = (
                f"the header Origin, {cut(origin)!r}, names another web page; if this page may use the server, "
                "start the server with --cors ORIGIN"
            )
            raise ApiError(403, message, code="origin_not_allowed")


def _is_own(origin: str, host: str) -> bool:
    """Return whether an origin has the host and port of the header Host, and so is the server's own page.

    The scheme is not compared: if a proxy decrypts TLS, the origin is https, but this server gets http requests.
    """
    scheme, _, rest = origin.partition("://")
    page, server = _parsed(rest), _parsed(host)
    port = PORTS.get(scheme.lower())
    if page is None or server is None or port is None:
        return False
    return (page[0], page[1] or port) == (server[0], server[1] or port)


def check_content_type(headers: Headers) -> None:
    """Check that a body is declared as JSON.

    Raises:
        ApiError: the header Content-Type is missing, or is not application/json.
    """
    given = headers.getlist("content-type")
    if [one.partition(";")[0].strip().lower() for one in given] != ["application/json"]:
        found = cut(", ".join(given)) or "none"
        message = f"the header Content-Type must be application/json, not {found!r}"
        raise ApiError(403, message, code="unsupported_media_type")


class OriginGuard:
    """ASGI middleware that makes the checks of this module, and refuses the requests that fail one.

    `hosts` is the result of `host_names`, or None for any host. Besides the server's own page, the web pages in
    `origins` may use the application; "*" is every page. `errors` counts the refusals by status.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str] | None, origins: Collection[str], errors: Counter
    ) -> None:
        self._app, self._hosts, self._origins, self._errors = app, hosts, origins, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and handle or refuse it."""
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                check_host(headers, self._hosts)
                check_origin(headers, self._origins)
                if scope["method"] == "POST":
                    check_content_type(headers)
            except ApiError as error:
                self._errors.add(1, str(error.status))
                app = error.response(scope["path"])
        await app(scope, receive, send)
