"""/v1/responses over HTTP: OpenAI's client in strict validation, and OpenAI's document where it is there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, ReasoningDelta
from mlx_engine.serve.responses import OWN_REASONING
from tests.serve import answers
from tests.serve.served import HTTP, Served, served, wait_for
from tests.serve.shapes import openai_document

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")

PATH = "/v1/responses"
ASK: dict[str, Any] = {
    "model": "micro",
    "input": "hello",
    "max_output_tokens": 8,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
BODY = {**{name: value for name, value in ASK.items() if name != "extra_body"}, **ASK["extra_body"]}


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    return importlib.import_module("openai")


def options(server: Served) -> dict[str, Any]:
    return {"base_url": server.url + "/v1", "api_key": "x", "max_retries": 0, "_strict_response_validation": True}


@pytest.fixture(scope="module")
def client(openai: ModuleType, server: Served) -> Iterator[Any]:
    with openai.OpenAI(**options(server)) as found:
        yield found


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with answers.toolsmith(tmp_path_factory.mktemp("model")) as found:
        yield found


def stream(server: Served, **parameters: Any) -> list[Any]:
    """Return the events of a response, checked against the document: types, numbers and places."""
    found = answers.events(server.post(PATH, {**BODY, "stream": True, **parameters}).content)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    document = openai_document()
    for event in found:
        assert document is None or document.event_problems(event) == []
    return found


def whole(server: Served, **parameters: Any) -> Any:
    found = server.post(PATH, {**BODY, **parameters}).json()
    document = openai_document()
    assert document is None or document.problems("Response", found) == []
    return found


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def test_a_response_has_the_answer_of_a_chat(client: Any, server: Served):
    reply = client.responses.create(**ASK)
    assert (reply.status, reply.incomplete_details.reason, reply.model) == ("incomplete", "max_output_tokens", "micro")
    said = server.chat("hello").json()
    assert reply.output_text == said["choices"][0]["message"]["content"]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (said["usage"]["prompt_tokens"], 8)
    assert reply.mlx_engine["digest"] == said["mlx_engine"]["digest"]
    assert (reply.store if hasattr(reply, "store") else None) is False


def test_a_reply_repeats_its_request(server: Served):
    given = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "prompt_cache_key": "k",
        "user": "u",
        "top_p": 0.5,
        "max_output_tokens": 3,
    }
    reply = whole(server, **given, store=True, include=["reasoning.encrypted_content"], client_metadata={"x": 1})
    assert {name: reply[name] for name in given} == given
    assert (reply["store"], reply["temperature"], reply["tool_choice"], reply["tools"]) == (False, 0, "auto", [])
    assert reply["mlx_engine"]["ignored"] == ["reasoning.effort"]


def test_a_stream_adds_up_to_the_response(client: Any):
    reply = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as events:
        found = list(events)
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == reply.output_text
    assert found[-1].response.output_text == reply.output_text
    assert (found[-1].type, found[-1].response.usage.output_tokens) == ("response.incomplete", 8)


def test_reasoning_text_and_calls_are_items(smith: Served, openai: ModuleType, monkeypatch: pytest.MonkeyPatch):
    given = answers.use(monkeypatch, answers.ANSWER)
    function = {"type": "function", "name": "list", "description": "List.", "parameters": {"type": "object"}}
    get = {"type": "function", "name": "get", "description": "Get.", "parameters": {"type": "object"}}
    web = {"type": "namespace", "name": "web", "description": "The web.", "tools": [get]}
    ask = {"model": "tools", "tools": [function, web, {"type": "web_search"}], "max_output_tokens": 40}
    ask["include"] = ["reasoning.encrypted_content"]
    reply, events = whole(smith, **ask), stream(smith, **ask)
    assert [tool["function"]["name"] for tool in given[0]] == ["list", "web__get"]
    thought, said, first, second = without_ids(reply["output"])
    assert thought["content"] == [{"type": "reasoning_text", "text": "I need the list."}]
    assert thought["encrypted_content"].startswith(OWN_REASONING)
    assert said["content"][0]["text"] == "Let me look."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "list", '{"path": "/", "n": 3}')
    assert (second["call_id"], second["namespace"], second["name"]) == ("call_b", "web", "get")
    assert reply["mlx_engine"]["ignored"] == ["tool web_search"]
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert without_ids(events[-1]["response"]["output"]) == without_ids(reply["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    with openai.OpenAI(**options(smith)) as client:
        asked = {**ASK, **ask, "extra_body": {"ignore_eos": True}}
        with client.responses.stream(**asked) as typed:
            assert [event.type for event in typed] == [event["type"] for event in events]
        items = client.responses.create(**asked).output
        # What came back goes in again, as agents send it.
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a"}
            for item in items
            if item.type == "function_call"
        ]
        again = client.responses.create(**{**asked, "input": [{"role": "user", "content": "hello"}, *items, *results]})
    assert again.usage.input_tokens > reply["usage"]["input_tokens"]


def test_the_events_come_in_their_order(server: Served, monkeypatch: pytest.MonkeyPatch):
    answers.use(monkeypatch, [ReasoningDelta("a"), CallBegin(0, "c", "f"), ArgumentsDelta(0, "{}"), CallEnd(0)])
    kinds = [event["type"].removeprefix("response.") for event in stream(server)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "incomplete",
    ]


def test_what_the_limit_cuts_off_is_incomplete(server: Served, monkeypatch: pytest.MonkeyPatch):
    answers.use(monkeypatch, [CallBegin(0, "c", "f"), ArgumentsDelta(0, '{"a": ')])
    (item,) = without_ids(whole(server)["output"])
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a": ')


def test_the_stream_begins_before_the_prompt_is_read_and_is_kept_alive_by_events():
    with served(keep_alive_seconds=0.02) as slow:
        slow.gate.hold()
        with HTTP.stream("POST", slow.url + PATH, json={**BODY, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("event: "))
            begun = [next(lines) for _ in range(4)]
            slow.gate.allow()
            rest = list(lines)
    assert begun == ["event: response.created", *["event: response.in_progress"] * 3]
    assert rest[-1] == "event: response.incomplete"


def test_a_failure_in_a_stream_is_its_last_event():
    with served() as dying:
        dying.gate.hold()
        with HTTP.stream("POST", dying.url + PATH, json={**BODY, "stream": True}) as response:
            wait_for(lambda: dying.worker.n_open == 1)
            dying.server.close(0.0)
            raw = response.read()
    events = answers.events(raw)
    document = openai_document()
    assert document is None or document.event_problems(events[-1]) == []
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_errors_are_of_the_classes_of_the_client(openai: ModuleType, client: Any):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASK, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        client.responses.create(**{**ASK, "input": "word " * 5000})
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="stores no responses") as error:
        client.responses.create(**ASK, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="unheard_of"):
        client.responses.create(**{**ASK, "extra_body": {"unheard_of": 1}})


def test_a_schema_of_the_answer_is_kept(client: Any, server: Served):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    reply = client.responses.create(model="micro", input="hello", max_output_tokens=60, text={"format": form})
    assert json.loads(reply.output_text)["a"] in ("x", "y")
    assert (reply.status, reply.text.format.schema_) == ("completed", schema)
    wrong = {**form, "schema": {**schema, "not": {}}}
    refused = server.post(PATH, {**BODY, "text": {"format": wrong}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")
    loose = whole(server, text={"format": {**wrong, "strict": False}}, ignore_eos=False, max_output_tokens=60)
    assert loose["mlx_engine"]["ignored"] == ["text.format: $.not"]


@pytest.mark.slow
def test_a_required_call_is_made_by_the_model_itself(smith: Served, openai: ModuleType):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    get = {"type": "function", "name": "get", "description": "Get.", "parameters": schema}
    web = {"type": "namespace", "name": "web", "description": "The web.", "tools": [get]}
    ask = {"model": "tools", "input": "hello", "tools": [web], "tool_choice": "required", "parallel_tool_calls": False}
    with openai.OpenAI(**options(smith)) as client:
        (item,) = client.responses.create(**ask, max_output_tokens=200).output
        with client.responses.stream(**ask, max_output_tokens=200) as events:
            (streamed,) = events.get_final_response().output
    for call in (item, streamed):
        assert (call.type, call.namespace, call.name, call.status) == ("function_call", "web", "get", "completed")
        assert json.loads(call.arguments)["n"] in (1, 2)
    assert item.call_id != streamed.call_id
    refused = smith.post(PATH, {**BODY, "model": "tools", "tool_choice": "required"}).json()["error"]
    assert refused["param"] == "tool_choice"
