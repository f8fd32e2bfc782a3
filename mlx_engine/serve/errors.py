"""Errors of the HTTP API, in OpenAI's form (message, type, param, code) or Anthropic's (message, type, request id)."""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import PurePath

import msgspec
from starlette.responses import Response

from mlx_engine.errors import (
    ChatTemplateError,
    ConstraintError,
    ContextLengthError,
    EngineError,
    OptionError,
    TokenizerError,
)

# Finds the place of a wrong value in `OptionError.expected`. In "messages[0].content to be ...", the place is
# `messages[0].content`.
PLACE = re.compile(r"(messages\S*) to be ")

# Clients recognise this error by its text: langchain-openai by "prompt is too long", litellm by "this model's maximum
# context length is".
TOO_LONG = "the prompt is too long: with max_tokens, this model's maximum context length is exceeded on this server; "

# Map HTTP statuses to error types: TYPES for OpenAI's API, MESSAGES_TYPES for the API of /v1/messages.
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# The header in which the API of /v1/messages returns the id of a request.
REQUEST_ID = "request-id"

# The id of the request to /v1/messages that the current asyncio task handles; None for requests of other APIs.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# The most characters of a quoted value in an error message, and of the whole message.
MOST_NAME, MOST_MESSAGE = 200, 1000


def cut(text: str, most: int = MOST_NAME) -> str:
    """Shorten a text to at most `most` characters by removing its middle."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


class ApiError(Exception):
    """An error that a client gets as JSON.

    `param` is the name of the wrong parameter, `code` a short name of the error for programs, and `headers` are further
    headers of the response. `message` is shortened to MOST_MESSAGE characters.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.code = status, cut(message, MOST_MESSAGE), code
        self.param = None if param is None else cut(param)
        super().__init__(self.message)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Return the body of the error in OpenAI's API."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """Return the HTTP response, in the error format of the API that the requested path belongs to."""
        if not is_of_messages(path):
            return json_response(self.body(), self.status, self.headers)
        body = messages_error(self)
        return json_response(body, self.status, {**self.headers, REQUEST_ID: str(body["request_id"])})


def is_of_messages(path: str) -> bool:
    """Return whether a path belongs to the API of /v1/messages."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def messages_error(error: ApiError) -> dict[str, object]:
    """Return the body of an error in the API of /v1/messages. If `request_id` is None, the body has a new id."""
    kind = MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    found = {"type": kind, "message": error.message}
    return {"type": "error", "error": found, "request_id": request_id.get() or new_id("req_")}


def new_id(prefix: str) -> str:
    """Return a new id that begins with a prefix."""
    return prefix + secrets.token_hex(12)


class ClientGoneError(Exception):
    """The client has closed its connection."""


def forget(error: BaseException | None) -> None:
    """Clear the local variables of all frames in the tracebacks of an error and of its causes.

    A local variable may hold a request body of many megabytes. The error refers to the local variables, and one of them
    may refer to the error. Such a cycle would keep the body in memory until the next garbage collection.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:  # causes may form a cycle
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response whose body is a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def api_error(error: Exception, prompt: str) -> ApiError:
    """Return any error as an ApiError.

    `prompt` is the name of the parameter that contains the prompt: "messages", "prompt", "input", ...; "" for none.
    """
    if isinstance(error, ApiError):
        return error
    text = _without_folder(str(error))
    if isinstance(error, ContextLengthError):
        return ApiError(400, TOO_LONG + text, param=prompt, code="context_length_exceeded")
    if isinstance(error, OptionError):
        place, param = PLACE.match(error.expected or ""), error.option
        if place or param == "prompt":
            param = place[1] if place and prompt != "input" else prompt
        return ApiError(400, text, param=param, code="invalid_value")
    if isinstance(error, ChatTemplateError | TokenizerError):
        return ApiError(400, text, param=prompt, code="invalid_value")
    if isinstance(error, ConstraintError):  # not status 500, after which clients would repeat the request in vain
        return ApiError(400, text, code="invalid_value")
    if isinstance(error, EngineError):
        return ApiError(500, text, code="engine_error")
    message = f"internal error ({type(error).__name__}); see the server's log"
    return ApiError(500, message, code="internal_error")


def _without_folder(text: str) -> str:
    """If a message begins with an absolute path, remove its folder: clients must not learn the server's paths."""
    place, colon, rest = text.partition(": ")
    return f"{PurePath(place).name}{colon}{rest}" if PurePath(place).is_absolute() else text
