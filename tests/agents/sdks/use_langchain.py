"""langchain-openai and langchain-anthropic: tools, and answers typed by a schema and by a tool."""

from __future__ import annotations

import json
from typing import Any

from asked import ARGUMENTS, CALL, FINAL, MODEL, ROOT, SAY_TRIP, TRIP, URL, Trip, get_weather
from checks import check, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

OPENAI: dict[str, Any] = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0}
chat, responses = ChatOpenAI(**OPENAI), ChatOpenAI(**OPENAI, use_responses_api=True)
messages = ChatAnthropic(base_url=ROOT, api_key="none", model=MODEL, max_retries=0, max_tokens=2000)
CALL_TRIP = f"Plan a trip.\nCall Trip {TRIP.model_dump_json()}"


def text_of(content: Any) -> str:
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return "".join(parts).strip()


@check
def tool_loop() -> None:
    for model in (chat, responses, messages):
        bound = model.bind_tools([get_weather])
        asked = HumanMessage(CALL)
        first = bound.invoke([asked])
        (call,) = first.tool_calls
        assert call["args"] == ARGUMENTS
        result = ToolMessage(get_weather(**ARGUMENTS), tool_call_id=call["id"])
        assert text_of(bound.invoke([asked, first, result]).content) == FINAL


@check
def streamed_calls() -> None:
    for model in (chat, messages):
        whole: Any = None
        for chunk in model.bind_tools([get_weather]).stream(CALL):
            whole = chunk if whole is None else whole + chunk
        assert [call["args"] for call in whole.tool_calls] == [ARGUMENTS], json.dumps(whole.tool_calls)


@check
def typed_answers() -> None:
    assert chat.with_structured_output(Trip).invoke(SAY_TRIP) == TRIP
    assert chat.with_structured_output(Trip, method="function_calling").invoke(CALL_TRIP) == TRIP
    assert messages.with_structured_output(Trip).invoke(CALL_TRIP) == TRIP


run("langchain")
