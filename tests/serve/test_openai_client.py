"""OpenAI's own client, with its strict validation on."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.serve.served import Served, chat_body, micro

# Imported by the first test: it takes a second, and every process that runs tests imports this file.
pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    return importlib.import_module("openai")


def options(server: Served) -> dict[str, Any]:
    return {"base_url": server.url + "/v1", "api_key": "x", "_strict_response_validation": True, "max_retries": 0}


@pytest.fixture(scope="module")
def client(openai: ModuleType, server: Served) -> Iterator[Any]:
    with openai.OpenAI(**options(server)) as found:
        yield found


def ask(**parameters: Any) -> dict[str, Any]:
    body = chat_body(logprobs=True, top_logprobs=2, n=2, model="micro", **parameters)
    ours = {"ignore_eos": body.pop("ignore_eos")}
    return {**body, "extra_body": ours}


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == 0)


def test_models(openai: ModuleType, client: Any):
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").owned_by == "mlx_engine"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: Any):
    reply = client.chat.completions.create(**ask())
    stream = list(client.chat.completions.create(**ask(), stream=True, stream_options={"include_usage": True}))
    assert text_of(stream) == reply.choices[0].message.content
    assert stream[-1].usage == reply.usage.model_copy(
        update={"prompt_tokens_details": stream[-1].usage.prompt_tokens_details}
    )
    assert len(reply.choices[1].logprobs.content) == 8
    assert reply.mlx_engine["digests"] == stream[-1].mlx_engine["digests"]


def test_asynchronous_chat(openai: ModuleType, server: Served, client: Any):
    async def run() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(**options(server)) as found:
            reply = await found.chat.completions.create(**ask())
            return reply, [chunk async for chunk in await found.chat.completions.create(**ask(), stream=True)]

    reply, stream = asyncio.run(run())
    assert (
        text_of(stream)
        == reply.choices[0].message.content
        == client.chat.completions.create(**ask()).choices[0].message.content
    )


def test_raw_response(client: Any):
    raw = client.chat.completions.with_raw_response.create(**ask())
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().object == "chat.completion"


def test_completions(client: Any):
    asked = {"model": "micro", "prompt": ["hello", "you"], "max_tokens": 5, "temperature": 0, "logprobs": 1}
    reply = client.completions.create(**asked)
    assert len(reply.choices) == 2
    texts = ["", ""]
    for chunk in openai_lenient(client).completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def openai_lenient(client: Any) -> Any:
    """The client's type of a completion's chunk has no null as finish_reason, which OpenAI's server sends."""
    return client.with_options(_extra_kwargs={"_strict_response_validation": False})


def test_errors_have_their_classes(openai: ModuleType, client: Any):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**ask(max_tokens=10**6))
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ask(), "model": "gpt-4"})


def test_embeddings(openai: ModuleType, client: Any, server: Served):
    plain = client.embeddings.create(model="micro", input="hello", encoding_format="float")
    assert np.array_equal(np.array(plain.data[0].embedding, np.float32), micro().embed("hello")[0])
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    # It asks for base64 unless told otherwise; its strict validation then expects numbers before it has decoded them.
    with openai.OpenAI(**{**options(server), "_strict_response_validation": False}) as usual:
        found = usual.embeddings.create(model="micro", input=["hello", "you there"], dimensions=8)
    values = np.array([one.embedding for one in found.data], np.float32)
    assert np.array_equal(values, micro().embed(["hello", "you there"], 8))
