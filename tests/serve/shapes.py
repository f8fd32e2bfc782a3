"""Checks of replies: against the types that the server publishes, and OpenAI's own document, where it is there."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from mlx_engine.serve.reply_types import ChatCompletion as Chat
from mlx_engine.serve.reply_types import ChatCompletionChunk as Chunk
from mlx_engine.serve.reply_types import ErrorReply as Failure
from mlx_engine.serve.reply_types import TextCompletion as Completion

NAMES = {
    Chat: "CreateChatCompletionResponse",
    Chunk: "CreateChatCompletionStreamResponse",
    Completion: "CreateCompletionResponse",
    Failure: "ErrorResponse",
}


def checked(value: Any, kind: type[Any]) -> Any:
    """Return a reply as its type, after a check against OpenAI's document if it is there."""
    document = openai_document()
    is_chunk = kind is Completion and "mlx_engine" not in value
    problems = document.problems(NAMES[kind], value, is_chunk=is_chunk) if document is not None else []
    assert problems == []
    return msgspec.convert(value, kind)


@cache
def openai_document() -> Any:
    """Return OpenAI's document; None if it, or jsonschema, is not on this machine."""
    try:
        from tests.clients.documents import Document, default_path
    except ImportError:
        return None
    return Document(default_path()) if default_path().exists() else None
