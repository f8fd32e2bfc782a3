"""openai: chat completions and responses, with strict validation of replies."""

from __future__ import annotations

import json
from typing import Any

import openai
from asked import ARGUMENTS, CALL, FINAL, MODEL, PARAMETERS, SAY_TRIP, TRIP, TWICE, URL, Trip, get_weather
from checks import check, raises, run

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True)
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT: Any = {"type": "function", **FUNCTION}
ASKED: Any = {"role": "user", "content": CALL}


def chat(messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], **options)


@check
def tool_loop() -> None:
    choice = chat([ASKED]).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    answer = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**ARGUMENTS)}
    last = chat([ASKED, answer, result])
    assert last.choices[0].message.content.strip() == FINAL
    assert last.choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens_details.cached_tokens > 0


@check
def streamed_tool_loop() -> None:
    with client.chat.completions.stream(model=MODEL, messages=[ASKED], tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert call.function.parsed_arguments == ARGUMENTS


@check
def parallel_calls() -> None:
    calls = chat([{"role": "user", "content": TWICE}]).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "Oslo"]
    assert len({call.id for call in calls}) == 2


@check
def choices_of_tools() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        (call,) = chat([ASKED], tool_choice=choice).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == ARGUMENTS
    raises(openai.BadRequestError, lambda: chat([ASKED], tool_choice={"type": "function", "function": {"name": "no"}}))


@check
def typed_answer() -> None:
    asked: Any = [{"role": "user", "content": SAY_TRIP}]
    found = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Trip)
    assert found.choices[0].message.parsed == TRIP
    whole = client.chat.completions.create(model=MODEL, messages=asked, response_format={"type": "json_object"})
    assert Trip.model_validate_json(whole.choices[0].message.content or "") == TRIP


@check
def responses_tool_loop() -> None:
    first = client.responses.create(model=MODEL, input=CALL, tools=[FLAT], store=False)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == ARGUMENTS
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**ARGUMENTS)}
    items: Any = [{"role": "user", "content": CALL}, *(item.model_dump() for item in first.output), result]
    last = client.responses.create(model=MODEL, input=items, tools=[FLAT], store=False)
    assert last.output_text.strip() == FINAL
    assert last.status == "completed"
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens > 0


@check
def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=CALL, tools=[FLAT], store=False) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
    assert [item.type for item in found.output][-1] == "function_call"


@check
def responses_choices_and_types() -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = client.responses.create(model=MODEL, input=CALL, tools=[FLAT], tool_choice=choice, store=False)
        assert [item.type for item in found.output][-1] == "function_call"
    parsed = client.responses.parse(model=MODEL, input=SAY_TRIP, text_format=Trip, store=False)
    assert parsed.output_parsed == TRIP
    raises(
        openai.BadRequestError,
        lambda: client.responses.create(model=MODEL, input="hello", previous_response_id="resp_1"),
        param="previous_response_id",
    )


run("openai")
