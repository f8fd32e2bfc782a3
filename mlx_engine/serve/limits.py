"""Who may send a request, how large it may be, and which id the client gave it."""

from __future__ import annotations

import hmac
from contextvars import ContextVar

from anyio import move_on_after
from starlette.datastructures import Headers
from starlette.types import Receive

from mlx_engine.serve.errors import ApiError, ClientGoneError

MAX_BODY = 4 << 20

# Seconds in which a client must have sent the whole body.
BODY_SECONDS = 30.0

# The id that a client gives to its request, in one of these headers, and how much of it is kept.
ID_HEADERS, MOST_ID = ("x-client-request-id", "x-request-id"), 512
client_id: ContextVar[str | None] = ContextVar("client_id", default=None)


def note_client_id(headers: Headers) -> None:
    """Set `client_id` for the task that handles a request, and those that it starts."""
    given = next((headers[name] for name in ID_HEADERS if name in headers), None)
    client_id.set(None if given is None else given[:MOST_ID])


def check_key(headers: Headers, key: str | None) -> None:
    """Check the API key of a request; without a key every request may pass.

    Raises:
        ApiError: the header `Authorization: Bearer KEY` is missing or has another key.
    """
    if key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # The time of this comparison does not depend on how many characters are right.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        message = (
            "API key: expected the header 'Authorization: Bearer KEY' with this server's key, found another or none"
        )
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_body(receive: Receive, headers: Headers, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: the body is larger than `limit` bytes, or has not arrived after so many seconds.
        ClientGoneError: the client has closed the connection.
    """
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()

    with move_on_after(seconds):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body.extend(message.get("body", b""))
            if len(body) > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)
    text = f"the body: expected all of it within {seconds:g} seconds, found {len(body):,} bytes; send it again"
    raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"})


def _too_large(limit: int) -> ApiError:
    message = (
        f"the body: expected at most {limit:,} bytes, found more; send less, or start the server with a larger bound"
    )
    # The connection stays open, and the rest of the body is read and dropped. Closing would reset the connection, and
    # most clients lose a response if that happens before they have sent everything.
    return ApiError(413, message, code="request_too_large")
