"""The ASGI application of the server: its routes, and `Endpoint`, which checks, reads and answers requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from anyio import move_on_after, to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mlx_engine.errors import TokenizerError
from mlx_engine.serve import page
from mlx_engine.serve.embeddings import embed, rerank
from mlx_engine.serve.errors import (
    REQUEST_ID,
    ApiError,
    ClientGoneError,
    api_error,
    cut,
    forget,
    is_of_messages,
    json_response,
    new_id,
    request_id,
)
from mlx_engine.serve.generation import CHAT, COMPLETION, MESSAGES, RESPONSES, Respond, count_tokens, generate
from mlx_engine.serve.limits import LARGE, check_key, note_client_id, read_body
from mlx_engine.serve.openapi import document
from mlx_engine.serve.origins import OriginGuard
from mlx_engine.serve.parameters import DetokenizeRequest, TokenizeRequest, parse
from mlx_engine.serve.prometheus import MEDIA_TYPE
from mlx_engine.serve.registry import Asked, Models
from mlx_engine.serve.server import LINGER_SECONDS
from mlx_engine.serve.service import Service
from mlx_engine.serve.sse import LateStream, failure_event, unless_gone

LOGGER = logging.getLogger("mlx_engine.serve")

# /tokenize accepts at most `BYTES_PER_TOKEN * Service.most_ids` bytes of text, and /detokenize `Service.most_ids` ids.
BYTES_PER_TOKEN = 8

# The memory for all large bodies that are being read, in multiples of `Service.max_body`.
MOST_BODIES = 16

# Maps each route that generates text to its `Form`.
FORMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

# The types of functions that answer a request by calling `respond` with the response. The second argument is the body
# or, for GET, the path parameters. A `Handler` gets the service of the loaded model; an `About` gets all models, loaded
# or not.
Handler = Callable[[Service, bytes, Respond], Awaitable[None]]
About = Callable[[Models, bytes, Respond], Awaitable[None]]


def create_app(models: Models) -> Starlette:
    """Return the ASGI application, which starts and stops the engine threads and closes the journal."""
    service = models.default.service

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        models.start()
        yield
        await models.stop()
        if service.recorder is not None:
            await to_thread.run_sync(service.recorder.journal.close)

    posts: dict[str, Handler] = {
        **{path: partial(generate, form=form) for path, form in FORMS.items()},
        "/v1/messages/count_tokens": count_tokens,
        "/v1/embeddings": embed,
        "/v1/rerank": rerank,
        "/tokenize": partial(converted, convert=_tokens),
        "/detokenize": partial(converted, convert=_text),
    }
    abouts: dict[str, About] = {"/v1/models": list_models, "/v1/models/{name:path}": describe, "/metrics": metrics}
    # These routes need no API key.
    opens: dict[str, About] = {"/health": health, "/ready": ready, "/openapi.json": openapi}
    guard = Middleware(OriginGuard, hosts=service.hosts, origins=service.origins, errors=models.metrics.errors)
    cors = Middleware(CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"])
    app = Starlette(
        routes=[
            *[Route(path, Endpoint(models, handler), methods=["POST"]) for path, handler in posts.items()],
            Route("/tokenizer_info", Endpoint(models, tokenizer_info), methods=["GET"]),
            *[
                Route(path, Endpoint(models, about=about, is_open=path in opens), methods=["GET"])
                for path, about in (abouts | opens).items()
            ],
            *page.routes(partial(snapshots_of, models), refusal=partial(refusal, models)),
        ],
        middleware=[guard, cors] if service.origins else [guard],
        exception_handlers={HTTPException: _not_routed},
        lifespan=lifespan,
    )
    # If a path has an extra slash at the end, answer with 404. By default, Starlette would redirect the client to the
    # host in the request's header Host, which may be any host.
    app.router.redirect_slashes = False
    return app


def refusal(models: Models, headers: Headers) -> Response | None:
    """Return the error response if a request lacks the API key; None if the request may pass."""
    try:
        check_key(headers, models.default.service.api_key)
    except ApiError as error:
        models.metrics.errors.add(1, str(error.status))
        return error.response()
    return None


class Endpoint:
    """The ASGI application of a route: runs `handler` or `about`, and cancels it if the client disconnects.

    If `is_open` is true, requests need no API key.
    """

    def __init__(
        self, models: Models, handler: Handler | None = None, *, about: About | None = None, is_open: bool = False
    ) -> None:
        self._models, self._handler, self._about, self._is_open = models, handler, about, is_open
        self._service = models.default.service  # for the settings that all models share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. If the client disconnects, cancel the request; this does not count as an error."""
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        path = scope["path"]
        request_id.set(new_id("req_") if is_of_messages(path) else None)

        async def respond(response: Response) -> None:
            if (given := request_id.get()) is not None:
                response.headers[REQUEST_ID] = given
            await response(scope, receive, sent)

        try:
            await self._handle(scope, receive, respond)
        except ClientGoneError as error:
            self._models.metrics.cancelled.add()
            forget(error)
        except Exception as error:
            failure = api_error(error, "")
            if failure.code == "internal_error" and not isinstance(error, ApiError):
                LOGGER.error("a request failed", exc_info=error)
            if not started:
                self._models.metrics.errors.add(1, str(failure.status))
                forget(error)
                await refuse(failure.response(path), receive, send, self._service.bodies.wait)

    async def _handle(self, scope: Scope, receive: Receive, respond: Respond) -> None:
        headers = Headers(scope=scope)
        if not self._is_open:
            check_key(headers, self._service.api_key)
        note_client_id(headers)
        if scope["method"] == "POST":
            body = await self._body(receive, headers)
        else:
            body = "/".join(scope["path_params"].values()).encode()
        await unless_gone(receive, self._answer(scope, body, respond))

    async def _answer(self, scope: Scope, body: bytes, respond: Respond) -> None:
        """Run `about` at once, or wait until the requested model is loaded and run `handler`.

        If the client asked for a stream, send SSE comments during a long wait.
        """
        if self._handler is None:
            assert self._about is not None  # noqa: S101 - an endpoint without a handler has `about`
            await self._about(self._models, body, respond)
            return
        asked = Asked()
        if not self._models.is_alone:
            is_post = scope["method"] == "POST"
            asked = self._models.asked(body) if is_post else Asked(QueryParams(scope["query_string"]).get("model"))
        with self._models.used(self._models.find(asked.model)) as use:
            service = use.model.service
            handle = partial(self._handler, service, body)
            can_wait = asked.stream is True and scope["path"] in FORMS
            if await use.within(service.keep_alive_seconds if can_wait else None):
                await handle(respond)
            else:
                comments = use.comments(service.keep_alive_seconds)
                await respond(LateStream(comments, handle, partial(failure_event, scope["path"])))

    async def _body(self, receive: Receive, headers: Headers) -> bytes:
        most, check = self._service.max_body, self._models.check_open
        with self._service.bodies.reading(receive, MOST_BODIES * most, check) as paced:
            return await read_body(paced, headers, most)


async def refuse(response: Response, receive: Receive, send: Send, wait: Callable[[], Awaitable[None]]) -> None:
    """Send the response to a request that failed.

    If the response closes the connection, discard incoming data for at most LINGER_SECONDS before ending the response:
    closing a socket with unread data resets the connection, and the client may lose the response. Await `wait` before
    each piece of data, to limit the rate.
    """
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    if "connection" in response.headers:
        with move_on_after(LINGER_SECONDS):
            message: Message = {"type": "http.request", "more_body": True}
            while message["type"] == "http.request" and message.get("more_body", False):
                await wait()
                message = await receive()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def list_models(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with a list of all models: an entry for each name of each model."""
    cards = await models.cards()
    pages = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    await respond(json_response({"object": "list", "data": cards, **pages}))


async def describe(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with the entry of one model; `body` is the model's name, from the path."""
    await respond(json_response(await models.card(body.decode())))


async def health(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with the server's state: status 200, or 503 if the server cannot answer requests."""
    state = models.health
    await respond(json_response({"status": state}, 200 if state == "ok" else 503))


async def ready(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with status 200 if the server answers requests, else 503. If models can be unloaded, add their states."""
    state = models.readiness
    states = {} if models.is_alone else {"models": {model.name: model.state for model in models}}
    await respond(json_response({"status": state, **states}, 200 if state == "ok" else 503))


async def openapi(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with the OpenAPI document."""
    await respond(json_response(document(models)))


async def metrics(models: Models, body: bytes, respond: Respond) -> None:
    """Respond with all metrics."""
    text, recorder = models.metrics_text(), models.default.service.recorder
    if recorder is not None:
        text += "".join(f"{line}\n" for line in recorder.journal.lines())
    await respond(Response(text, media_type=MEDIA_TYPE))


def snapshots_of(models: Models, query: bytes) -> AsyncIterator[Any]:
    """Return an iterator over engine snapshots of one model: the model that `query` names, otherwise the default model.

    Raises:
        ApiError: there is no model with the name in `query`.
    """
    return models.snapshots(models.find(QueryParams(query).get("model")))


async def converted(
    service: Service, body: bytes, respond: Respond, *, convert: Callable[[Service, bytes], Response]
) -> None:
    """Wait for a turn (`limits.Turns`), call `convert` with the body in a thread, and respond with the result."""
    _ = service.engine  # refuse a request at once if it cannot be answered now
    async with service.turns.turn(is_large=len(body) > LARGE, is_bounded=True) as turn:
        response = await turn.run(partial(convert, service, body))
    await respond(response)


def _tokens(service: Service, body: bytes) -> Response:
    asked, tokenizer = parse(body, TokenizeRequest), service.engine.tokenizer
    service.check_model(asked.model)
    text, param = asked.text, "content" if asked.prompt is None else "prompt"
    n, most = len(text.encode(errors="replace")), BYTES_PER_TOKEN * service.most_ids
    if n > most:
        raise too_many(param, n, most, "bytes")
    try:
        ids = tokenizer.encode(text, asked.special or asked.prompt is not None)
    except TokenizerError as error:
        raise api_error(error, param) from error
    bos = tokenizer.bos_id if tokenizer.add_bos and asked.add_special_tokens and asked.prompt is not None else None
    ids = ids if bos is None else [bos, *ids]
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.context})


def _text(service: Service, body: bytes) -> Response:
    asked, tokenizer, most = parse(body, DetokenizeRequest), service.engine.tokenizer, service.most_ids
    service.check_model(asked.model)
    if len(asked.tokens) > most:
        raise too_many("tokens", len(asked.tokens), most, "ids")
    try:
        text = tokenizer.decode(asked.tokens)
    except TokenizerError as error:
        raise api_error(error, "tokens") from error
    return json_response({"content": text, "prompt": text})


async def tokenizer_info(service: Service, body: bytes, respond: Respond) -> None:
    """Describe the tokenizer in vLLM's form. Clients of /tokenize read the end-of-text token from this reply."""
    tokenizer = service.engine.tokenizer
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    found: dict[str, object] = {name: None if i is None else tokenizer.token(i) or None for name, i in names.items()}
    found |= {"add_bos_token": tokenizer.add_bos, "chat_template": tokenizer.chat_template}
    await respond(json_response({**found, "vocab_size": tokenizer.vocab_size, "model_max_length": service.context}))


def too_many(param: str, n: int, most: int, what: str) -> ApiError:
    """Return the error for a parameter with too many bytes or ids; `what` is "bytes" or "ids"."""
    message = f"{param}: {n:,} {what} are too many; at most {most:,} are accepted per request"
    return ApiError(400, message, param=param, code="invalid_value")


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette calls this for no other error
    path, code = cut(request.scope["path"]), "not_found"
    message = f"{path}: no such route"
    if error.status_code == 405:
        message, code = f"{path} has no method {cut(request.method)}; see the header Allow", "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.scope["path"])
