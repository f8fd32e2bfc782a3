"""/v1/messages over HTTP, with the client of its API in strict validation."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, ReasoningDelta, TextDelta
from mlx_engine.serve.generation import _events
from mlx_engine.serve.messages import MessagesReply
from tests.serve import answers
from tests.serve.served import HTTP, Served, served, wait_for

pytestmark = pytest.mark.skipif(find_spec("anthropic") is None, reason="anthropic is not installed")

PATH = "/v1/messages"
ASK: dict[str, Any] = {
    "model": "micro",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"ignore_eos": True, "temperature": 0},
}
BODY = {**{name: value for name, value in ASK.items() if name != "extra_body"}, **ASK["extra_body"]}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    return importlib.import_module("anthropic")


def options(server: Served) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": "x", "max_retries": 0, "_strict_response_validation": True}


@pytest.fixture(scope="module")
def client(anthropic: ModuleType, server: Served) -> Iterator[Any]:
    with anthropic.Anthropic(**options(server)) as found:
        yield found


def test_a_message_has_the_answer_of_a_chat(client: Any, server: Served):
    reply = client.messages.create(**ASK)
    said = server.chat("hello").json()
    assert [(block.type, block.text) for block in reply.content] == [("text", said["choices"][0]["message"]["content"])]
    assert (reply.stop_reason, reply.stop_sequence, reply.model) == ("max_tokens", None, "micro")
    assert reply.usage.output_tokens == 8
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == said["usage"]["prompt_tokens"]
    assert reply.mlx_engine["digest"] == said["mlx_engine"]["digest"]
    assert reply._request_id.startswith("req_")


def test_a_stream_adds_up_to_the_message(client: Any):
    reply = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == reply.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 8)
    assert last.usage.cache_read_input_tokens + last.usage.input_tokens == (
        reply.usage.cache_read_input_tokens + reply.usage.input_tokens
    )


def test_what_was_cached_is_counted_apart():
    with served() as fresh:
        body = {**BODY, "messages": [{"role": "user", "content": "word " * 100}]}
        first, second = (fresh.post(PATH, body).json()["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0 < second["cache_read_input_tokens"]
    assert first["input_tokens"] == second["input_tokens"] + second["cache_read_input_tokens"]


def test_tokens_are_counted_as_they_are_read(client: Any):
    reply = client.messages.create(**ASK)
    found = client.messages.count_tokens(model="micro", messages=ASK["messages"])
    assert found.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


def stop_of(server: Served) -> str:
    """Return a character with which the answer ends early."""
    text: str = server.post(PATH, BODY).json()["content"][0]["text"]
    return text[-1]


def test_more_tokens_than_fit_are_a_bound(server: Served):
    stop = stop_of(server)
    reply = server.post(PATH, {**BODY, "max_tokens": 32_000, "stop_sequences": ["never", stop]}).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert server.chat("hello", max_tokens=32_000).status_code == 400


def test_thinking_text_and_calls_are_blocks(client: Any, server: Served, monkeypatch: pytest.MonkeyPatch):
    stop = stop_of(server)
    answers.use(monkeypatch, answers.ANSWER)
    monkeypatch.setattr(MessagesReply, "stop", None)  # as if the model had ended its turn
    ask = {**ASK, "max_tokens": 100, "stop_sequences": [stop]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for reply in (whole, streamed):
        thought, said, first, second = reply.content
        assert (thought.thinking, thought.signature) == ("I need the list.", "mlx_engine")
        assert said.text == "Let me look."
        assert (first.id, first.name, first.input) == ("call_a", "list", {"path": "/", "n": 3})
        assert (second.id, second.name, second.input) == ("call_b", "web__get", {})
        assert reply.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_a_call_that_the_limit_cuts_off_is_no_tool_use(client: Any, monkeypatch: pytest.MonkeyPatch):
    answers.use(monkeypatch, [CallBegin(0, "call_a", "list"), ArgumentsDelta(0, '{"path": ')])
    reply = client.messages.create(**ASK)
    assert (reply.stop_reason, reply.content[0].input) == ("max_tokens", {})


def test_parts_alternate_as_the_model_writes_them(client: Any, monkeypatch: pytest.MonkeyPatch):
    answers.use(monkeypatch, [TextDelta("a"), ReasoningDelta("b"), ReasoningDelta("c"), TextDelta("d")])
    assert [block.type for block in client.messages.create(**ASK).content] == ["text", "thinking", "text"]


def test_the_stream_begins_before_the_prompt_is_read_and_is_kept_alive():
    with served(keep_alive_seconds=0.02) as slow:
        slow.gate.hold()
        with HTTP.stream("POST", slow.url + PATH, json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            begun = [next(lines) for _ in range(6)]
            slow.gate.allow()
            rest = list(lines)
    assert begun[0] == "event: message_start"
    assert '"input_tokens"' in begun[1]
    assert begun[3:5] == ["event: ping", 'data: {"type":"ping"}']
    assert rest[-3] == "event: message_stop"


def test_steps_without_text_do_not_hold_back_the_heartbeat():
    """Prefill wakes the stream after each step: the time since the last event counts, not that since the last step."""

    class Steps:
        error, n = None, 0

        @property
        def has_ended(self) -> bool:
            return self.n == 20

        async def changed(self, seconds: float) -> bool:
            self.n += 1
            return True

    async def run() -> list[bytes]:
        call = Steps()
        asyncio.get_running_loop().time = lambda: float(call.n)  # type: ignore[method-assign]
        reply = SimpleNamespace(begin=lambda: b"begin", news=lambda: b"", heartbeat=lambda: b"ping", end=lambda: b"end")
        service = SimpleNamespace(keep_alive_seconds=5.0)
        return [data async for data in _events(service, call, reply, "messages")]  # type: ignore[arg-type]

    assert asyncio.run(run()) == [b"begin", b"ping", b"ping", b"ping", b"end"]


def test_errors_are_of_the_classes_of_the_client(anthropic: ModuleType, client: Any, server: Served):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "other"})
    assert missing.value.body["error"]["type"] == missing.value.type == "not_found_error"
    assert missing.value.body["request_id"] == missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "word " * 5000}]})
    with pytest.raises(anthropic.BadRequestError, match="unheard_of"):
        client.messages.create(**{**ASK, "extra_body": {"unheard_of": 1}})
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", cast_to=object, body={})
    assert HTTP.post(server.url + PATH, content=b"{}").json()["error"]["type"] == "permission_error"


def test_both_kinds_of_key_are_taken(anthropic: ModuleType):
    with served(api_key="secret") as locked:
        for key in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            with anthropic.Anthropic(**{**options(locked), **key}) as client:
                assert client.messages.create(**ASK).role == "assistant"
        with anthropic.Anthropic(**options(locked)) as client, pytest.raises(anthropic.AuthenticationError) as error:
            client.messages.create(**ASK)
    assert error.value.type == "authentication_error"


def test_an_error_in_a_stream_ends_it(anthropic: ModuleType):
    with served() as dying:
        dying.gate.hold()
        with anthropic.Anthropic(**options(dying)) as client:
            stream = client.messages.create(**ASK, stream=True)
            assert next(stream).type == "message_start"
            wait_for(lambda: dying.worker.n_open == 1)
            dying.gate.allow(3)
            dying.server.close(0.0)
            with pytest.raises(anthropic.APIStatusError) as error:
                list(stream)
    assert error.value.type == "overloaded_error"


def test_names_of_the_model(anthropic: ModuleType):
    with served(aliases=("claude-test", "micro")) as aliased, anthropic.Anthropic(**options(aliased)) as client:
        assert client.messages.create(**{**ASK, "model": "claude-test"}).model == "claude-test"
        assert [one.id for one in client.models.list()] == ["micro", "claude-test"]
        assert client.models.retrieve("claude-test").display_name == "claude-test"
        assert aliased.chat(model="other").status_code == 404
    with served(any_model=True) as open_to_all:
        assert open_to_all.chat(model="other").json()["model"] == "other"
        assert open_to_all.chat().json()["model"] == "micro"


def test_a_head_request_is_answered(server: Served):
    assert HTTP.head(server.url + "/").status_code == 200


def test_a_schema_of_the_answer_is_kept(client: Any):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(**{**ASK, "max_tokens": 60, "extra_body": {}}, output_config=config)
    assert json.loads(reply.content[0].text)["a"] in ("x", "y")
    assert reply.stop_reason == "end_turn"


@pytest.mark.slow
def test_one_tool_is_called_by_the_model_itself(anthropic: ModuleType, tmp_path: Path):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools = [{"name": name, "description": "", "input_schema": schema} for name in ("get", "put")]
    choice = {"type": "tool", "name": "put", "disable_parallel_tool_use": True}
    ask = {**ASK, "model": "tools", "max_tokens": 200, "extra_body": {}, "tools": tools, "tool_choice": choice}
    with answers.toolsmith(tmp_path) as smith, anthropic.Anthropic(**options(smith)) as client:
        reply = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        for one in (reply, streamed):
            (block,) = one.content
            assert (block.type, block.name, one.stop_reason) == ("tool_use", "put", "tool_use")
            assert block.input["n"] in (1, 2)
        result = {
            "type": "tool_result",
            "tool_use_id": reply.content[0].id,
            "content": [{"type": "text", "text": "done"}],
        }
        turns = [
            *ask["messages"],
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result]},
        ]
        again = client.messages.create(**{**ask, "messages": turns, "tool_choice": {"type": "none"}})
        assert "tool_use" not in [block.type for block in again.content]
        with pytest.raises(anthropic.BadRequestError, match="tool_choice must name one of the tools"):
            client.messages.create(**{**ask, "tool_choice": {"type": "tool", "name": "other"}})


def test_an_answer_that_has_begun_is_continued(client: Any):
    whole = client.messages.create(**ASK).content[0].text
    turns = [*ASK["messages"], {"role": "assistant", "content": whole[:3]}]
    reply = client.messages.create(**{**ASK, "messages": turns})
    count = client.messages.count_tokens(model="micro", messages=turns).input_tokens
    assert count == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert count > client.messages.count_tokens(model="micro", messages=ASK["messages"]).input_tokens
    assert (whole[:3] + reply.content[0].text).startswith(whole)
