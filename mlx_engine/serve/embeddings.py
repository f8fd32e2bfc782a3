"""The routes /v1/embeddings and /v1/rerank: vectors of texts, and the relevance of documents to a query.

The scheduler runs the texts of an HTTP request beside requests that generate text. The texts are divided into groups of
at most one text per slot, and the groups run sequentially.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from anyio import to_thread

from mlx_engine.backends import types_of
from mlx_engine.errors import ModelError
from mlx_engine.loop.request import Request
from mlx_engine.serve.call import Call
from mlx_engine.serve.errors import ApiError, api_error, json_response, new_id
from mlx_engine.serve.generation import Respond, check_text, logged
from mlx_engine.serve.limits import LARGE, client_id
from mlx_engine.serve.parameters import NOOPS_OF_TEXTS, parse
from mlx_engine.serve.service import Service

# OpenAI's bound on the texts of one request.
MOST_TEXTS = 2048
# Seconds between two attempts to find room in the queue for the next texts of a request.
RETRY_SECONDS = 0.05


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def texts(self) -> list[Any]:
        """The inputs, each a text or a list of token ids.

        Raises:
            ApiError: the list is empty or too long, or has items of different types.
        """
        if isinstance(self.input, str):
            return [self.input]
        kinds = {type(item) for item in self.input}
        if len(kinds) != 1:
            rule = "must be a text, a list of texts, a list of token ids, or a list of such lists"
            message = f"input {rule}, and is {'a mixture' if kinds else 'an empty list'}"
            raise ApiError(400, message, param="input", code="invalid_value")
        texts = [self.input] if kinds == {int} else list(self.input)
        _check_number("input", len(texts))
        return texts


class Document(msgspec.Struct, forbid_unknown_fields=False):
    """A document as an object; all fields except `text` are ignored."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/rerank. `instruction` says which documents are relevant; the default is for web searches."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents.

        Raises:
            ApiError: there are no documents, or too many.
        """
        _check_number("documents", len(self.documents))
        return [one if isinstance(one, str) else one.text for one in self.documents]


def _check_number(param: str, n: int) -> None:
    if not 1 <= n <= MOST_TEXTS:
        message = f"{param} must have from 1 to {MOST_TEXTS:,} texts, not {n:,}"
        raise ApiError(400, message, param=param, code="invalid_value")


async def embed(service: Service, body: bytes, respond: Respond) -> None:
    """Respond with the vectors of texts."""
    asked, requests = await _run(service, body, "input", _embeddings)
    await respond(await to_thread.run_sync(lambda: json_response(_embedded(service, asked, requests))))


async def rerank(service: Service, body: bytes, respond: Respond) -> None:
    """Respond with documents and their relevance, the most relevant first."""
    asked, requests = await _run(service, body, "documents", _rankings)
    await respond(json_response(_ranked(service, asked, requests)))


# The type of `_embeddings` and `_rankings`.
Read = Callable[[Service, bytes, Callable[[str], None]], tuple[Any, list[Request]]]


async def _run(service: Service, body: bytes, param: str, read: Read) -> tuple[Any, list[Request]]:
    """Call `read` with the body in a thread, and run the returned requests. Return the parsed body and these requests.

    `param` is the name of the parameter that has the texts, for errors.
    """
    received = service.clock()
    _ = service.engine  # refuse a request at once if it cannot be answered now
    try:
        async with service.turns.turn(is_large=len(body) > LARGE, is_bounded=True) as turn:
            asked, requests = await turn.run(partial(read, service, body, partial(check_text, service, turn)))
        tokenized = service.clock()
        about: dict[str, Any] = {"received": received, "tokenized": tokenized, "client_id": client_id.get()}
        for i in range(0, len(requests), service.worker.slots):
            await _run_some(service, Call(requests[i : i + service.worker.slots], **about), is_begun=i > 0)
    except ModelError as error:
        raise ApiError(400, api_error(error, param).message, param="model", code="unsupported_by_model") from error
    except Exception as error:
        raise logged(api_error(error, param), error) from error
    return asked, requests


async def _run_some(service: Service, call: Call, *, is_begun: bool) -> None:
    """Run the requests of a call.

    If the queue is full and earlier texts of the HTTP request have already run (`is_begun`), wait for room.

    Raises:
        ApiError: the queue is full (status 429), and `is_begun` is false.
    """
    while True:
        try:
            service.worker.check_room(call.n_answers)
            break
        except ApiError as error:
            if error.status != 429 or not is_begun:
                raise
        await asyncio.sleep(RETRY_SECONDS)
    async with service.worker.running(call):
        await call.ended()


def _embeddings(service: Service, body: bytes, check: Callable[[str], None]) -> tuple[EmbeddingRequest, list[Request]]:
    """Return the parameters, and a request for each text. Call `check` with each text before encoding it.

    Raises:
        ApiError, EngineError: a parameter is invalid, or a text is too long.
    """
    asked, prompts = parse(body, EmbeddingRequest, NOOPS_OF_TEXTS), service.engine.prompts
    service.check_model(asked.model)
    prompts.check_dimensions(asked.dimensions)
    return asked, [prompts.embedding(text, check, service.adapter(asked.model)) for text in asked.texts]


def _rankings(service: Service, body: bytes, check: Callable[[str], None]) -> tuple[RerankRequest, list[Request]]:
    """Do the same as `_embeddings` for /v1/rerank: return the parameters, and a request for each document."""
    asked, prompts = parse(body, RerankRequest, NOOPS_OF_TEXTS), service.engine.prompts
    service.check_model(asked.model)
    adapter = service.adapter(asked.model)
    return asked, [prompts.reranking(asked.query, text, asked.instruction, check, adapter) for text in asked.texts]


def _usage(requests: Sequence[Request]) -> dict[str, object]:
    n = sum(len(request.prompt_ids) for request in requests)
    return {"prompt_tokens": n, "total_tokens": n}


def _receipt(service: Service, values: np.ndarray) -> dict[str, object]:
    """Return the SHA-256 of `values` as little-endian float32, and the types of activations and of the KV cache."""
    digest = sha256(values.astype("<f4").tobytes()).hexdigest()
    return {"digest": digest, **types_of(service.engine.backend)}


def _embedded(service: Service, asked: EmbeddingRequest, requests: Sequence[Request]) -> dict[str, object]:
    vectors = [service.engine.prompts.vector(request, asked.dimensions) for request in requests]
    is_packed = asked.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(one.astype("<f4").tobytes()).decode() if is_packed else one.tolist(),
        }
        for i, one in enumerate(vectors)
    ]
    head = {"object": "list", "data": data, "model": asked.model or service.model}
    return {**head, "usage": _usage(requests), "mlx_engine": _receipt(service, np.stack(vectors))}


def _ranked(service: Service, asked: RerankRequest, requests: Sequence[Request]) -> dict[str, object]:
    scores, texts = [service.engine.prompts.relevance(request) for request in requests], asked.texts
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: asked.top_n]
    shows = asked.return_documents is not False
    results = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if shows else {})} for i in order
    ]
    head = {"id": new_id("rerank-"), "object": "list", "model": asked.model or service.model}
    return {**head, "results": results, "usage": _usage(requests), "mlx_engine": _receipt(service, np.array(scores))}
