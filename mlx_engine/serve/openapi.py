"""The OpenAPI document of the server, made from the types of its requests and replies.

The types define the parameters. This module adds the requirements that Python types do not express.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

import mlx_engine
from mlx_engine.options import LONGEST_STOP, MOST_ALTERNATIVES, MOST_BIAS, MOST_STOPS
from mlx_engine.serve import reply_types as replies
from mlx_engine.serve.embeddings import MOST_TEXTS, EmbeddingRequest, RerankRequest
from mlx_engine.serve.messages import CountRequest, MessagesRequest
from mlx_engine.serve.parameters import (
    DECLARED,
    NOOPS_OF_CHAT,
    NOOPS_OF_COMPLETIONS,
    NOOPS_OF_TEXTS,
    SEEDS,
    TOKEN_ID,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from mlx_engine.serve.reading import MEDIA
from mlx_engine.serve.reading import TEXTS as TEXT_PARTS
from mlx_engine.serve.registry import Models
from mlx_engine.serve.responses import HARMLESS, REFUSED, ResponsesRequest
from mlx_engine.serve.responses import ROLES as ITEM_ROLES
from mlx_engine.tokenizer.chat_prompt import ROLES

Schema = dict[str, Any]

# Values that count as an absent field, because clients send back an assistant's message with null and empty fields.
ABSENT: Schema = {"enum": [None, []]}
ALTERNATIVES: Schema = {"minimum": 0, "maximum": MOST_ALTERNATIVES}
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
STOP: Schema = {"minLength": 1, "maxLength": LONGEST_STOP}

# Maps each parameter to the bounds that its Python type does not express. `mlx_engine.options` declares most of them.
LIMITS: Mapping[str, Schema] = {
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    **{name: about.schema for name, about in DECLARED.items()},
    "top_k": {"minimum": -1},
    "logit_bias": {
        "propertyNames": {"pattern": f"^({TOKEN_ID})$"},
        "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
    },
    "seed": {"minimum": SEEDS[0], "maximum": SEEDS[-1]},
    "stop": STOP,
}

# Maps the HTTP statuses of errors to their descriptions.
ERRORS = {
    400: "A parameter is invalid; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Host is not a name of this server, another web page sent the request, or Content-Type is not JSON.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full, or too many requests wait to be read; the header Retry-After has the seconds to wait.",
    500: "The server has an internal error.",
    503: "The model is loading or has failed, or the server is stopping; Retry-After may have the seconds to wait.",
}
POST_ERRORS = (400, 401, 403, 404, 408, 413, 429, 500, 503)


class Operation(NamedTuple):
    """A route: its types, and the statuses of its errors."""

    method: str
    path: str
    name: str  # the operation's id in the document
    summary: str
    reply: type[msgspec.Struct] | None  # the type of a whole reply; None for plain text
    errors: tuple[int, ...] = POST_ERRORS
    request: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None  # the type of a stream event's data; None if no reply is a stream
    failure: type[msgspec.Struct] = replies.ErrorReply  # the type of an error's body
    is_ended_by_done: bool = True  # whether a stream ends with the event "[DONE]"


OPERATIONS = [
    Operation(
        *("post", "/v1/chat/completions", "chat", "Continue a conversation", replies.ChatCompletion),
        request=ChatRequest,
        chunk=replies.ChatCompletionChunk,
    ),
    Operation(
        *("post", "/v1/completions", "complete", "Continue prompts", replies.TextCompletion),
        request=CompletionRequest,
        chunk=replies.TextCompletion,
    ),
    Operation(
        *("post", "/v1/responses", "respond", "Continue a conversation of items", replies.Response),
        request=ResponsesRequest,
        chunk=replies.ResponsesEvent,
        is_ended_by_done=False,
    ),
    Operation(
        *("post", "/v1/messages", "message", "Continue a conversation of blocks", replies.Message),
        request=MessagesRequest,
        chunk=replies.MessagesEvent,
        failure=replies.MessagesErrorReply,
        is_ended_by_done=False,
    ),
    Operation(
        *("post", "/v1/messages/count_tokens", "count", "Count the tokens of a conversation of blocks", replies.Count),
        request=CountRequest,
        failure=replies.MessagesErrorReply,
    ),
    Operation(
        "post", "/v1/embeddings", "embed", "Return vectors of texts", replies.EmbeddingList, request=EmbeddingRequest
    ),
    Operation("post", "/v1/rerank", "rerank", "Rank documents for a query", replies.Ranking, request=RerankRequest),
    Operation("post", "/tokenize", "tokenize", "Return the ids of a text", replies.Tokens, request=TokenizeRequest),
    Operation("post", "/detokenize", "detokenize", "Return the text of ids", replies.Text, request=DetokenizeRequest),
    Operation("get", "/tokenizer_info", "tokenizer", "Describe the tokenizer", replies.TokenizerInfo, (401, 403, 503)),
    Operation("get", "/v1/models", "models", "List the models", replies.ModelList, (401, 403, 503)),
    Operation("get", "/v1/models/{name}", "model", "Describe a model", replies.Model, (401, 403, 404, 503)),
    Operation("get", "/health", "health", "Report whether requests are taken", replies.Health, (403,)),
    Operation("get", "/ready", "ready", "Report whether a request would be answered", replies.Readiness, (403,)),
    Operation("get", "/metrics", "metrics", "Report metrics as Prometheus' text", None, (401, 403)),
]


class Limits(NamedTuple):
    """The bounds that the served model sets. With several models, or if it can be unloaded, only `names` is set."""

    names: list[str] | None  # the names of all models; None if any name is served
    slots: int | None = None  # the largest number of answers to each prompt of a request
    last_id: int | None = None  # the last token id
    context: int | None = None  # the largest number of tokens of a prompt and its answer
    hidden_size: int | None = None  # the size of a vector of /v1/embeddings
    most_ids: int | None = None  # the largest number of ids that /detokenize accepts

    @classmethod
    def of(cls, models: Models) -> Limits:
        """Return the bounds; raise ApiError if `Models.is_alone` and the model is not ready."""
        service = models.default.service
        names = None if service.any_model else [name for model in models for name in model.service.models]
        if not models.is_alone:
            return cls(names)
        config = service.engine.config
        sizes = config.vocab_size - 1, service.context, config.hidden_size, service.most_ids
        return cls(names, service.worker.slots, *sizes)

    def named(self) -> Schema:
        """Return the schema of a request's parameter `model`: one of `names`, or null; {} if any name is served."""
        return {} if self.names is None else {"enum": [*self.names, None]}


def _most(rule: str, most: int | None) -> Schema:
    """Return a schema with the upper bound `most` for the keyword `rule`, such as "maxItems"; {} if `most` is None."""
    return {} if most is None else {rule: most}


def document(models: Models) -> Schema:
    """Return the OpenAPI document for all served models; raise ApiError as `Limits.of` does."""
    parts = [(op.request, op.reply, op.chunk, op.failure) for op in OPERATIONS]
    ordered = sorted({kind for part in parts for kind in part if kind is not None}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    _limit(schemas, Limits.of(models))
    paths: Schema = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    return {
        "openapi": "3.2.0",  # the first version that can describe the events of a stream
        "info": {"title": "mlx_engine", "version": mlx_engine.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        # The empty alternative {} says that a request may have no key.
        "security": [{"key": []}] if models.default.service.api_key is not None else [{}, {"key": []}],
    }


def _operation(op: Operation) -> Schema:
    found: Schema = {"operationId": op.name, "summary": op.summary}
    if op.request is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(op.request)}}}
    if op.name == "tokenizer":
        found["parameters"] = [{"name": "model", "in": "query", "required": False, "schema": TEXT}]
    if "{name}" in op.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    media = {"text/plain": {"schema": TEXT}} if op.reply is None else _json(op.reply)
    if op.chunk is not None:
        media = {**media, "text/event-stream": {"itemSchema": _event(op)}}
    responses = {"200": {"description": "The reply.", "content": media}}
    failure = _json(op.failure)
    responses |= {str(status): {"description": ERRORS[status], "content": failure} for status in op.errors}
    if op.name in ("health", "ready"):
        found["security"] = []
        responses["503"] = {"description": "Requests are refused.", "content": media}
    return {**found, "responses": responses}


def _json(kind: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": _ref(kind)}}


def _event(op: Operation) -> Schema:
    """Return the schema of an event: a chunk or an error as JSON, or, if `is_ended_by_done`, "[DONE]"."""
    assert op.chunk is not None  # noqa: S101 - for mypy
    as_json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(op.chunk), _ref(op.failure)]}}
    data = [{"const": "[DONE]"}, as_json] if op.is_ended_by_done else [as_json]
    return {"type": "object", "properties": {"data": {"type": "string", "anyOf": data}}, "required": ["data"]}


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _limit(schemas: dict[str, Any], of: Limits) -> None:
    """Add to the schemas of requests the requirements that Python types do not express."""
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    token = {"type": "integer", "minimum": 0, **_most("maximum", of.last_id)}
    limits = {**LIMITS, "n": {"minimum": 1, **_most("maximum", of.slots)}}
    limits["model"] = {} if of.names is None else {"enum": of.names}
    limits["stop_token_ids"] = {"items": token}
    for schema in (schemas[op.request.__name__] for op in OPERATIONS if op.request and issubclass(op.request, Body)):
        for name, limit in limits.items():
            if name in schema["properties"]:
                given = schema["properties"][name]
                given.get("anyOf", [given])[0].update(limit)
        for name, about in DECLARED.items():
            schema["properties"][name]["description"] = about.help
        schema["properties"]["stop"]["anyOf"][1] = {
            "type": "array", "items": {"type": "string", **STOP}, "maxItems": MOST_STOPS,
        }  # fmt: skip
    for schema, known in ((chat, NOOPS_OF_CHAT), (completion, NOOPS_OF_COMPLETIONS)):
        schema["properties"] |= known
        schema["allOf"] = [
            _needs("stream_options", {"type": "object"}, "stream", {"const": True}),
            _forbids("prompt_logprobs", {"type": "integer"}, "stream", {"const": True}),
        ]
    messages = {"type": "array", "minItems": 1, **_most("maxItems", of.context), "items": _message()}
    chat["properties"]["messages"] = messages
    chat["properties"]["top_logprobs"]["anyOf"][0].update(ALTERNATIVES)
    chat["allOf"].append(_needs("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs", {"const": True}))
    completion["properties"]["logprobs"]["anyOf"][0].update(ALTERNATIVES)
    ids: Schema = {"type": "array", "minItems": 1, "items": token}
    texts = {**TEXTS, "minItems": 1}
    completion["properties"]["prompt"] = {
        "anyOf": [TEXTS["items"], texts, ids, {"type": "array", "minItems": 1, "items": ids}]
    }
    schemas["DetokenizeRequest"]["properties"]["tokens"].update(items=token, **_most("maxItems", of.most_ids))
    schemas["TokenizeRequest"]["oneOf"] = [
        {"properties": {given: TEXT, other: {"type": "null"}}, "required": [given]}
        for given, other in (("content", "prompt"), ("prompt", "content"))
    ]
    for name in ("TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = of.named()
    _limit_texts(schemas, of, ids)
    for name in ("MessagesRequest", "CountRequest"):
        schemas[name]["properties"] |= {**_blocks(of.context), "stop": {"enum": [None]}}
    schemas["ResponsesRequest"]["properties"] |= _items(of.context)


def _limit_texts(schemas: dict[str, Any], of: Limits, ids: Schema) -> None:
    """Add requirements to the schemas of embedding and rerank requests. `ids` is the schema of a list of token ids."""
    several: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_TEXTS}
    text, dimensions = TEXTS["items"], {"minimum": 1, **_most("maximum", of.hidden_size)}
    embedding, ranking = schemas["EmbeddingRequest"]["properties"], schemas["RerankRequest"]["properties"]
    embedding["input"] = {"anyOf": [text, {**several, "items": text}, ids, {**several, "items": ids}]}
    embedding["dimensions"]["anyOf"][0].update(dimensions)
    ranking["documents"].update(several)
    for properties in (embedding, ranking):
        properties |= {**NOOPS_OF_TEXTS, "model": of.named()}


def _blocks(most: int | None) -> Schema:
    """Return a map of three parameters of /v1/messages to their schemas; `messages` has at most `most` items."""
    result = {"tool_use_id": TEXT, "content": _or_null(_content())}
    call = {"id": TEXT, "name": TEXT, "input": {"type": "object"}}
    user = [_part("tool_result", result, ["tool_use_id"]), *_parts("tool_result")]
    answer = [_part("thinking", {"thinking": TEXT}), _part("tool_use", call), *_parts("thinking", "tool_use")]
    messages = [
        _object({"role": {"const": role}, "content": {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": parts}}]}})
        for role, parts in (("user", user), ("assistant", answer), ("system", _parts()))
    ]
    found = {"type": "array", "minItems": 1, **_most("maxItems", most), "items": {"anyOf": messages}}
    return {"messages": found, "system": _or_null(_content()), "max_tokens": {"type": "integer", "minimum": 0}}


def _items(most: int | None) -> Schema:
    """Return a map of parameters of /v1/responses to their schemas; `input` has at most `most` items."""
    message = _object({"role": {"enum": list(ITEM_ROLES)}, "content": _content()})
    message["properties"]["type"] = {"const": "message"}
    kinds: dict[str, Any] = {
        "reasoning": ({"content": _or_null(_content())}, []),
        "function_call": ({"call_id": TEXT, "name": TEXT, "arguments": TEXT}, None),
        "function_call_output": ({"call_id": TEXT, "output": _content()}, None),
    }
    known = [_part(kind, *about) for kind, about in kinds.items()]
    others = _object({"type": {"type": "string", "not": {"enum": ["message", "item_reference", *kinds]}}})
    items = {"type": "array", "minItems": 1, **_most("maxItems", most), "items": {"anyOf": [message, *known, others]}}
    # At least one item must be a message, a call or a result. If all items were reasoning that another server has
    # encrypted, the server would drop all of them, and the prompt would have no message.
    items["contains"] = {"anyOf": [message, *known[1:]]}
    return {
        **{name: {"enum": list({None, HARMLESS.get(name)})} for name in REFUSED},
        "input": {"anyOf": [TEXT, items]},
        "max_output_tokens": _or_null({"type": "integer", "minimum": 0}),
        "truncation": {"enum": ["auto", "disabled", None]},
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, _part("function", {"name": TEXT})]},
    }


def _content() -> Schema:
    """Return the schema of the content of a message: a text, or a list of parts. Each part has text, or is ignored."""
    return {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": _parts()}}]}


def _parts(*others: str) -> list[Schema]:
    """Return a schema for each type of part that has text, and one for all ignored parts.

    The last schema excludes media, which are refused, and the types in `others`, for which the caller has schemas.
    """
    texts = [_part(kind, {key: TEXT}) for kind, key in TEXT_PARTS.items()]
    left_out = {"type": "string", "not": {"enum": [*TEXT_PARTS, *MEDIA, *others]}}
    return [*texts, _object({"type": left_out})]


def _part(kind: str, properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Return the schema of an object whose `type` is `kind`. If `required` is None, all properties are required."""
    return _object({"type": {"const": kind}, **properties}, ["type", *(properties if required is None else required)])


def _object(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _message() -> Schema:
    """Return the schema of a message of a chat. If an assistant's message has tool calls, it needs no content."""
    closed = {"additionalProperties": False}
    part = {**_part("text", {"text": TEXT}), **closed}
    function = {**_object({"name": TEXT, "arguments": {"anyOf": [TEXT, {"type": "object"}]}}), **closed}
    call = {**_object({"id": TEXT, "type": {"const": "function"}, "function": function}, ["function"]), **closed}
    text = {"anyOf": [TEXT, ABSENT]}
    content = {"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": part}]}
    calls = {"type": "array", "minItems": 1, "items": call}
    properties = {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [content, ABSENT]},
        "tool_calls": {"anyOf": [calls, ABSENT]},
        "name": text,
        "tool_call_id": text,
        "reasoning_content": text,
    }
    return {
        **_object(properties, ["role"]),
        "anyOf": [
            {"properties": {"content": content, "tool_calls": ABSENT}, "required": ["content"]},
            {"properties": {"role": {"const": "assistant"}, "tool_calls": calls}, "required": ["tool_calls"]},
        ],
        "additionalProperties": ABSENT,
    }


def _needs(name: str, value: Schema, other: str, wanted: Schema) -> Schema:
    """Return the rule: if parameter `name` matches `value`, parameter `other` must be given and match `wanted`."""
    given = {"properties": {name: value}, "required": [name]}
    return {"if": given, "then": {"properties": {other: wanted}, "required": [other]}}


def _forbids(name: str, value: Schema, other: str, unwanted: Schema) -> Schema:
    """Return the rule: parameter `name` may not match `value` while parameter `other` matches `unwanted`."""
    return {"not": {"properties": {name: value, other: unwanted}, "required": [name, other]}}
