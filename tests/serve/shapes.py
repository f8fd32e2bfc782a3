"""What replies look like: every key that is allowed, with its type. And OpenAI's own document, where it is there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

DOCUMENT = Path(__file__).parents[3] / "shared" / "schemas" / "openai-openapi.json"


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Cached(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class Times(Struct):
    tokenize_ms: float
    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    write_ms: float
    total_ms: float
    cache_n: int
    prompt_n: int
    prompt_per_second: float
    predicted_n: int
    predicted_per_second: float | None
    steps: int
    rows_per_step: float
    bytes_read: int
    bandwidth_share: float | None
    preemptions: int


class Tokens(Struct):
    token_id: int
    text: str


class Reuse(Struct):
    cached_tokens: int
    agreeing_tokens: int
    cause: Literal["disabled", "first_use", "differs", "retokenized", "evicted", "window", "memory"] | None
    position: int | None
    found: Tokens | None
    expected: Tokens | None


class Ours(Struct):
    digest: str
    digests: list[str]
    seed: int
    timings: Times | list[Times]
    cache: Reuse | list[Reuse]


class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class Logprobs(Struct):
    content: list[TokenLogprob]
    refusal: None


class Message(Struct):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct):
    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class Head(Struct, kw_only=True):
    id: str
    created: int
    model: Literal["micro"]
    system_fingerprint: str


class Chat(Head, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    mlx_engine: Ours


class Delta(Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class Chunk(Head, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    mlx_engine: Ours | None = None


class OldLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: OldLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Head, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None
    mlx_engine: Ours | None = None


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Struct):
    error: Error


NAMES = {
    Chat: "CreateChatCompletionResponse",
    Chunk: "CreateChatCompletionStreamResponse",
    Completion: "CreateCompletionResponse",
    Failure: "ErrorResponse",
}


def checked(value: Any, kind: type[Any]) -> Any:
    """Return a reply as its type, after a check against OpenAI's document if it is there."""
    validator = openai_validator(NAMES[kind]) if kind in NAMES else None
    # A completion's chunk has the shape of a reply, whose finish_reason may not be null in the document.
    if validator is not None and not (kind is Completion and _is_chunk(value)):
        validator.validate(value)
    return msgspec.convert(value, kind)


def _is_chunk(value: Any) -> bool:
    return any(choice["finish_reason"] is None for choice in value["choices"]) or value.get("usage", 0) is None


@cache
def openai_validator(name: str) -> Any:
    """Return a validator of one of OpenAI's schemas; None if the document is not on this machine."""
    if not DOCUMENT.exists():
        return None
    from jsonschema import Draft202012Validator

    components = _document()
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


@cache
def _document() -> Any:
    return _with_null(json.loads(DOCUMENT.read_text(encoding="utf-8"))["components"])


def _with_null(value: Any) -> Any:
    """Write `nullable`, which JSON Schema does not know, as a choice of two types."""
    if isinstance(value, list):
        return [_with_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _with_null(item) for key, item in value.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if value.get("nullable") is True else inner
