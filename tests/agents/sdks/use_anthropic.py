"""anthropic: messages and count_tokens, with strict validation of replies."""

from __future__ import annotations

from typing import Any

import anthropic
from asked import ARGUMENTS, CALL, FINAL, MODEL, PARAMETERS, ROOT, TWICE, get_weather
from checks import check, raises, run

client = anthropic.Anthropic(base_url=ROOT, api_key="none", max_retries=0, _strict_response_validation=True)
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
ASKED: Any = {"role": "user", "content": CALL}


def create(messages: list[Any], **options: Any) -> Any:
    given = {"max_tokens": 2000, "tools": [TOOL], **options}
    return client.messages.create(model=MODEL, messages=messages, **given)


@check
def tool_loop() -> None:
    first = create([ASKED])
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert call.input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**ARGUMENTS)}
    answer = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    last = create([ASKED, answer, {"role": "user", "content": [result]}])
    assert [block.text.strip() for block in last.content if block.type == "text"] == [FINAL]
    assert last.stop_reason == "end_turn"
    assert last.usage.cache_read_input_tokens > 0


@check
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=2000, messages=[ASKED], tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "input_json" in kinds
    assert next(block for block in found.content if block.type == "tool_use").input == ARGUMENTS


@check
def thinking() -> None:
    found = create([ASKED], thinking={"type": "enabled", "budget_tokens": 1024})
    assert found.content[0].type == "thinking"
    assert found.content[0].thinking
    assert found.content[0].signature
    quiet = create([ASKED], thinking={"type": "disabled"})
    assert all(block.type != "thinking" for block in quiet.content)


@check
def choices_of_tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        found = create([ASKED], tool_choice=choice)
        assert found.stop_reason == "tool_use"
    calls = [block for block in create([{"role": "user", "content": TWICE}]).content if block.type == "tool_use"]
    assert [call.input["city"] for call in calls] == ["Paris", "Oslo"]


@check
def count_of_tokens() -> None:
    found = client.messages.count_tokens(model=MODEL, messages=[ASKED], tools=[TOOL])
    usage = create([ASKED]).usage
    assert found.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@check
def system_texts_and_stops() -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    found = create([{"role": "user", "content": "Say one two three"}], system=system, stop_sequences=["two"])
    assert found.stop_reason == "stop_sequence"
    assert found.stop_sequence == "two"
    raises(anthropic.BadRequestError, lambda: create([]))


run("anthropic")
