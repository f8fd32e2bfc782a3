"""/v1/messages with the client of its API, in strict validation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from tests.serve.served import Served

pytestmark = pytest.mark.skipif(find_spec("anthropic") is None, reason="anthropic is not installed")

ASK: dict[str, Any] = {
    "model": "micro",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"ignore_eos": True, "temperature": 0},
}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: ModuleType, server: Served) -> Iterator[Any]:
    options = {"base_url": server.url, "api_key": "x", "max_retries": 0, "_strict_response_validation": True}
    with anthropic.Anthropic(**options) as found:
        yield found


def test_a_message(client: Any, server: Served):
    reply = client.messages.create(**ASK)
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 8
    said = server.chat("hello").json()
    assert reply.content[0].text == said["choices"][0]["message"]["content"]
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == said["usage"]["prompt_tokens"]


def test_a_stream(client: Any):
    reply = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == reply.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 8


def test_count(client: Any):
    reply = client.messages.create(**ASK)
    found = client.messages.count_tokens(model="micro", messages=ASK["messages"])
    assert found.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
