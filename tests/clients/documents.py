"""OpenAI's document: which schema each recorded reply, chunk and error must match."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jsonschema import Draft202012Validator

from tests.clients.recorder import Exchange

# The stream of this route has events of many kinds, and ends with one of these.
RESPONSES = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")

MESSAGES = "/v1/messages"

REPLIES = {
    RESPONSES: "Response",
    "/v1/chat/completions": "CreateChatCompletionResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/models": "ListModelsResponse",
}
CHUNKS = {
    "/v1/chat/completions": "CreateChatCompletionStreamResponse",
    "/v1/completions": "CreateCompletionResponse",
}
ERROR, MODEL = "ErrorResponse", "Model"

VARIABLE = "OPENAI_DOCUMENT"


def default_path() -> Path:
    """Return where the document is expected: in the environment variable, or in a folder beside the repository."""
    beside = Path(__file__).parents[3] / "shared" / "schemas" / "openai-openapi.json"
    return Path(os.environ.get(VARIABLE) or beside)


class Document:
    """OpenAI's OpenAPI document.

    Args:
        path: the document as JSON.
    """

    def __init__(self, path: Path) -> None:
        components = with_null(json.loads(path.read_text(encoding="utf-8"))["components"])
        self._whole, self._chunks = components, _for_chunks(components)
        self._events = _events(components["schemas"])

    def problems(self, name: str, value: Any, *, is_chunk: bool = False) -> list[str]:
        """Return how a value differs from a schema."""
        components = self._chunks if is_chunk else self._whole
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        errors = Draft202012Validator(schema).iter_errors(value)
        return [f"{name}{error.json_path[1:]}: {error.message}" for error in errors]

    def event_problems(self, value: Any) -> list[str]:
        """Return how an event of /v1/responses differs from the schema of its type."""
        return self.problems(self._events[value["type"]], value)

    def check(self, exchanges: Iterable[Exchange]) -> tuple[Counter[str], list[str]]:
        """Return how many documents of each schema were checked, and what is wrong with them."""
        counts, wrong = Counter[str](), list[str]()
        for exchange in exchanges:
            is_own = exchange.status < 400 and not exchange.path.startswith("/v1/")
            if is_own or exchange.path.startswith(MESSAGES):  # routes of our own and of another API
                continue
            at = f"{exchange.method} {exchange.path} {exchange.status}"
            try:
                for name, value, is_chunk in documents(exchange, self._events):
                    counts[f"{name} (chunk)" if is_chunk else name] += 1
                    wrong += [f"{at}: {problem}" for problem in self.problems(name, value, is_chunk=is_chunk)]
            except (ValueError, AssertionError) as error:
                wrong.append(f"{at}: {error}; the body: {exchange.body[-200:]!r}")
        return counts, wrong


def documents(
    exchange: Exchange, events_of_responses: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, Any, bool]]:
    """Yield the JSON documents of a response: the schema, the value, and whether it is a chunk of a stream.

    `events_of_responses` has the schemas of the events of /v1/responses by their types.

    Raises:
        ValueError: a document is no JSON.
        AssertionError: the response is none of the API's, or a stream has no end or misses an event.
    """
    if exchange.media_type == "text/event-stream" and exchange.path == RESPONSES:
        values = [json.loads(event) for event in exchange.events]
        assert not exchange.is_whole or values[-1]["type"] in ENDS, f"expected an end, found {values[-1]['type']}"
        numbers = [value["sequence_number"] for value in values]
        assert numbers == list(range(len(numbers))), f"expected sequence numbers from 0, found {numbers}"
        yield from ((events_of_responses[value["type"]], value, False) for value in values)
    elif exchange.media_type == "text/event-stream":
        events = exchange.events
        if exchange.is_whole:
            assert "[DONE]" in events[-1:] or "error" in json.loads(events[-1]), f"expected [DONE], found {events[-1:]}"
        for value in (json.loads(event) for event in events if event != "[DONE]"):
            yield (ERROR, value, False) if "error" in value else (CHUNKS[exchange.path], value, True)
    elif exchange.is_whole:
        assert exchange.media_type == "application/json", f"expected JSON, found {exchange.media_type}"
        if exchange.status >= 400:
            yield ERROR, exchange.value, False
        else:
            assert exchange.status == 200, "expected the status 200"
            yield REPLIES.get(exchange.path, MODEL), exchange.value, False


def _events(schemas: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the schemas of the events of /v1/responses by their types."""
    names = [one["$ref"].rpartition("/")[2] for one in schemas.get("ResponseStreamEvent", {"anyOf": []})["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def with_null(value: Any) -> Any:
    """Write `nullable`, which JSON Schema does not know, as a choice of two types."""
    if isinstance(value, list):
        return [with_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: with_null(item) for key, item in value.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if value.get("nullable") is True else inner


def _for_chunks(components: Any) -> Any:
    """Return the schemas for chunks of /v1/completions.

    The document has one schema for its replies and its chunks. In chunks, OpenAI's server sends null as the
    `finish_reason` of an answer that goes on, and as the `usage` of chunks before the last.
    """
    changed = copy.deepcopy(components)
    completion = changed["schemas"]["CreateCompletionResponse"]["properties"]
    for properties, name in ((completion["choices"]["items"]["properties"], "finish_reason"), (completion, "usage")):
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    return changed
