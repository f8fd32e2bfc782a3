"""Anthropic's own client, with strict validation of what it gets."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from checks import API_KEY, ASK, BASE_URL, MODEL, check, raises, run

URL = BASE_URL.removesuffix("/v1")
STRICT: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
client = anthropic.Anthropic(base_url=URL, api_key=API_KEY, **STRICT)
GREEDY: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 12, "extra_body": {"temperature": 0}}


@check
def message() -> None:
    reply = client.messages.create(**GREEDY)
    assert (reply.stop_reason, reply.usage.output_tokens, reply.content[0].type) == ("max_tokens", 12, "text")
    assert reply._request_id.startswith("req_")


@check
def stream() -> None:
    asked = {**GREEDY, "max_tokens": 32_000, "stop_sequences": ["."], "system": [{"type": "text", "text": "Be kind."}]}
    with client.messages.stream(**asked) as found:
        text = "".join(found.text_stream)
        last = found.get_final_message()
    assert (last.stop_reason, last.stop_sequence, last.content[0].text) == ("stop_sequence", ".", text)


@check
def schema() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(**{**GREEDY, "max_tokens": 100}, output_config=config)
    assert json.loads(reply.content[0].text)["n"] in (1, 2)


@check
def count() -> None:
    usage = client.messages.create(**GREEDY).usage
    found = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    assert found == usage.input_tokens + usage.cache_read_input_tokens


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).type == "model"


@check
def errors() -> None:
    raises(anthropic.NotFoundError, lambda: client.messages.create(**{**GREEDY, "model": "other"}), status_code=404)
    raises(anthropic.BadRequestError, lambda: client.messages.create(**GREEDY, thinking={"type": "x"}), status_code=400)
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", **STRICT)
    raises(anthropic.AuthenticationError, lambda: stranger.messages.create(**GREEDY), type="authentication_error")
    bearer = anthropic.Anthropic(base_url=URL, auth_token=API_KEY, **STRICT)
    assert bearer.messages.create(**GREEDY).role == "assistant"


run("anthropic")
