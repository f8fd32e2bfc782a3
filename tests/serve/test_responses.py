"""/v1/responses with OpenAI's client, in strict validation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from tests.serve.served import Served

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")

ASK: dict[str, Any] = {
    "model": "micro",
    "input": "hello",
    "max_output_tokens": 8,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def client(openai: ModuleType, server: Served) -> Iterator[Any]:
    options = {"base_url": server.url + "/v1", "api_key": "x", "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(**options) as found:
        yield found


def test_a_response(client: Any, server: Served):
    reply = client.responses.create(**ASK)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    said = server.chat("hello").json()
    assert reply.output_text == said["choices"][0]["message"]["content"]
    assert reply.usage.input_tokens == said["usage"]["prompt_tokens"]
    assert reply.mlx_engine["digest"] == said["mlx_engine"]["digest"]


def test_a_stream(client: Any):
    reply = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == reply.output_text
    assert events[-1].response.output_text == reply.output_text
    assert events[-1].response.usage.output_tokens == 8
