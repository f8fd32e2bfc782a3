"""Tools over HTTP and in Python: a scripted model writes calls, and a random model is made to write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import mlx_engine
from mlx_engine.conversation.functions import call_function
from mlx_engine.engine import Engine
from mlx_engine.errors import OptionError
from mlx_engine.serve import reply_types
from tests.scripted import Rendered, ScriptedEngine, write_model
from tests.serve.answers import events as numbered
from tests.serve.served import Served, events, served
from tests.serve.shapes import checked

CHAT = "/v1/chat/completions"
MODEL = "micro"
# Without it a random model thinks for ever.
NO_THINKING = {"enable_thinking": False}
TEXT = 'Before.\n<tool_call>\n{"name": "look", "arguments": {"place": "a \\"b\\" é"}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["north", "south"]}, "deep": {"type": "boolean"}},
    "required": ["place"],
}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
WAIT: dict[str, Any] = {"type": "function", "function": {"name": "wait"}}
ASKED = [{"role": "user", "content": "Look."}]


def script(prompt: Rendered) -> str:
    """Call a tool, twice if asked to; when there are results, say so."""
    if prompt.results:
        return f"I saw {' and '.join(prompt.results)}."
    if not prompt.tools:
        return TEXT
    return f"<think>\nI must look.\n</think>\n\n{TEXT}" + ("\n" + TEXT[8:]) * ("twice" in prompt.asked)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools") / "model.gguf"
    write_model(made, context=4096)
    return made


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine.load(path, script) as made:
        yield made


@pytest.fixture(scope="module")
def smith(engine: ScriptedEngine) -> Iterator[Served]:
    with served(engine=engine, kv_memory=16 << 20, budget=512) as found:
        yield found


@pytest.fixture(scope="module")
def random_engine(path: Path) -> Iterator[Engine]:
    with mlx_engine.load(path, "parallel", threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def lottery(random_engine: Engine) -> Iterator[Served]:
    with served(engine=random_engine, kv_memory=16 << 20, budget=512) as found:
        yield found


def body(**more: Any) -> dict[str, Any]:
    return {"messages": ASKED, "tools": [LOOK, WAIT], "max_tokens": 200, **more}


def chat(server: Served, **more: Any) -> Any:
    reply = server.post(CHAT, body(**more))
    assert reply.status_code == 200, reply.text
    return checked(reply.json(), reply_types.ChatCompletion).choices[0]


@pytest.mark.slow
def test_a_reply_has_reasoning_content_and_calls(smith: Served):
    choice = chat(smith)
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == ("I must look.", "Before.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"place": 'a "b" é'}
    first, second = chat(smith, messages=[{"role": "user", "content": "Look twice."}]).message.tool_calls
    assert first.id != second.id
    assert first.function == second.function


def test_without_tools_a_call_is_text(smith: Served):
    for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = chat(smith, **more)
        assert (choice.message.content, choice.finish_reason) == (TEXT, "stop")
        assert choice.message.tool_calls is reply_types.msgspec.UNSET


def test_a_call_that_the_limit_cuts_off_is_not_ended_by_a_call(smith: Served):
    choice = chat(smith, max_tokens=45)
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls or '"}' not in choice.message.tool_calls[0].function.arguments


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "reason"), [("place", "stop"), ("</tool_call>", "tool_calls")])
def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_run(smith: Served, stop: str, reason: str, *, stream: bool):
    response = smith.post(CHAT, body(messages=ASKED, stop=stop, stream=stream))
    choices = [data["choices"][0] for data in events(response.content)[:-1]] if stream else response.json()["choices"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (reason, stop)
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
    asked = {"model": MODEL, "input": ASKED, "temperature": 0, "tools": tools, "stop": [stop], "stream": stream}
    response = smith.post("/v1/responses", asked)
    reply = numbered(response.content)[-1]["response"] if stream else response.json()
    assert reply["output"][-1]["type"] == "function_call"
    assert reply["output"][-1]["status"] == ("incomplete" if reason == "stop" else "completed")


@pytest.mark.some(1)
@pytest.mark.parametrize("asked", ["Look.", "Look twice."])
def test_a_stream_has_the_parts_of_the_reply(smith: Served, asked: str):
    messages = [{"role": "user", "content": asked}]
    found = events(smith.post(CHAT, body(messages=messages, stream=True)).content)
    chunks = [checked(data, reply_types.ChatCompletionChunk).choices[0] for data in found[:-1]]
    deltas = [each.delta for each in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "I must look."
    assert "".join(delta.content or "" for delta in deltas) == "Before."
    calls: dict[int, Any] = {}
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.id:
                assert call.index not in calls
                calls[call.index] = [call.id, call.type, call.function.name, ""]
            calls[call.index][3] += call.function.arguments
    expected = chat(smith, messages=messages).message.tool_calls
    assert [each[1:] for each in calls.values()] == [
        ["function", call.function.name, call.function.arguments] for call in expected
    ]
    assert list(calls) == list(range(len(expected)))
    assert [each.finish_reason for each in chunks if each.finish_reason] == ["tool_calls"]


def test_the_result_of_a_call_goes_back(smith: Served):
    message = smith.post(CHAT, body()).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "two foxes"}
    assert chat(smith, messages=[*ASKED, message, result]).message.content == "I saw two foxes."


def test_openais_client_reads_calls(smith: Served):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{smith.url}/v1", api_key="none") as client:
        given: Any = {"model": MODEL, **body()}
        whole = client.chat.completions.create(**given).choices[0].message
        with client.chat.completions.stream(**given) as stream:
            final = stream.get_final_completion().choices[0].message
    assert whole.tool_calls[0].function.arguments == final.tool_calls[0].function.arguments
    assert final.tool_calls[0].function.name == "look"


@pytest.mark.slow
def test_a_required_call_is_made_by_any_model(lottery: Served):
    quick = {"parallel_tool_calls": False, "chat_template_kwargs": NO_THINKING}
    for seed in range(3):
        found = chat(lottery, tool_choice="required", seed=seed, **quick)
        (call,) = found.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("look", "wait")
        assert call.function.name == "wait" or arguments["place"] in ("north", "south")
    named = {"type": "function", "function": {"name": "wait"}}
    choice = chat(lottery, tool_choice=named, **quick)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.function.name for call in choice.message.tool_calls] == ["wait"]
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    choice = chat(lottery, tools=[strict], logit_bias=opening(lottery), **quick)
    assert choice.message.tool_calls[0].function.name == "look"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["place"] in ("north", "south")


def opening(server: Served) -> dict[str, int]:
    """Return a bias that makes a free answer begin with a call."""
    (token,) = server.post("/tokenize", {"content": "<tool_call>", "special": True}).json()["tokens"]
    return {str(token): 100}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
        ),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "dance"}}}, "tool_choice"),
    ],
)
def test_what_cannot_be_demanded_is_refused_by_name(lottery: Served, more: dict[str, Any], param: str):
    reply = lottery.post(CHAT, body(**more))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_model_without_tools_refuses_them(server: Served):
    for more in ({}, {"tool_choice": "required"}):
        error = server.post(CHAT, body(**more)).json()["error"]
        assert error["param"] == "tools"
        assert "this model's chat template has no tools; leave the tools out" in error["message"]


def test_the_other_apis_demand_calls_too(lottery: Served):
    message = lottery.post(
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 200,
            "messages": ASKED,
            "tools": [{"name": "wait", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ).json()
    assert [(block["type"], block.get("name")) for block in message["content"]] == [("tool_use", "wait")]
    response = lottery.post(
        "/v1/responses",
        {
            "model": MODEL,
            "input": "Wait.",
            "tools": [{"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "function", "name": "wait"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "none"},
        },
    ).json()
    assert [(item["type"], item.get("name")) for item in response["output"]] == [("function_call", "wait")]


# In Python


def look(place: str, deep: Literal["yes", "no"] = "no") -> str:
    """Look at a place.

    Args:
        place: Where to look,
            in words.
    """
    return f"foxes at {place}, {deep}"


def test_engine_chat_returns_text_reasoning_and_calls(engine: ScriptedEngine):
    messages: list[Any] = [*ASKED]
    answer = engine.chat(messages, 200, tools=[look])
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Before.", "I must look.", "stop")
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("look", {"place": 'a "b" é'})
    result = {"role": "tool", "tool_call_id": call.id, "content": call_function(look, call.arguments or {})}
    messages += [answer.message, result]
    last = engine.chat(messages, 200, tools=[look])
    assert (last.text, last.tool_calls) == ('I saw foxes at a "b" é, no.', [])
    assert last.message == {"role": "assistant", "content": last.text}
    assert engine.chat(ASKED, 200, tools=[look], tool_choice="none").text == TEXT


def test_the_example_in_the_documents_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    define, loop = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    arguments = '{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}'

    def answer(prompt: Rendered) -> str:
        return prompt.results[0] if prompt.results else f"<tool_call>\n{arguments}\n</tool_call>"

    with ScriptedEngine.load(path, answer) as engine:
        monkeypatch.setattr(mlx_engine, "load", lambda _: engine)
        exec(define + loop, {})
    assert capsys.readouterr().out == "2 sunny days in Ulm\n"


def test_engine_chat_demands_calls(random_engine: Engine):
    def wait(reason: Literal["rain", "snow"]) -> None:
        """Wait."""

    tools = [wait, LOOK]
    answer = random_engine.chat(
        ASKED, 200, tools=tools, tool_choice="wait", parallel_tool_calls=False, variables=NO_THINKING
    )
    assert [(call.name, call.arguments in ({"reason": "rain"}, {"reason": "snow"})) for call in answer.tool_calls] == [
        ("wait", True)
    ]
    for choice in ("dance", {"type": "function"}):
        with pytest.raises(OptionError, match="tool_choice must be auto, none or required, or the name of a tool"):
            random_engine.chat(ASKED, tools=tools, tool_choice=choice)
    with pytest.raises(OptionError, match="tool_choice needs tools"):
        random_engine.chat(ASKED, tool_choice="required")
    with pytest.raises(OptionError, match=r"tools\[0\] must be a function"):
        random_engine.chat(ASKED, tools=[{"name": ""}])
    with pytest.raises(OptionError, match="two have the name 'wait'"):
        random_engine.chat(ASKED, tools=[wait, wait])
