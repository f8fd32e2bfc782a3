"""instructor: answers typed by a named tool and by a schema."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from asked import MODEL, ROOT, SAY_TRIP, TRIP, URL, Trip
from checks import check, run

CALL_TRIP: Any = [{"role": "user", "content": f"Plan a trip.\nCall Trip {TRIP.model_dump_json()}"}]
SAID: Any = [{"role": "user", "content": SAY_TRIP}]


def same(found: Trip) -> None:
    """Compare with the trip: the object is of a class that instructor has made of the type."""
    assert found.model_dump() == TRIP.model_dump()


@check
def named_tool() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
    same(client.chat.completions.create(model=MODEL, messages=CALL_TRIP, response_model=Trip, max_retries=0))


@check
def schema() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    same(client.chat.completions.create(model=MODEL, messages=SAID, response_model=Trip, max_retries=0))


@check
def tool_of_messages() -> None:
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=ROOT, api_key="none"), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    found = client.messages.create(model=MODEL, messages=CALL_TRIP, response_model=Trip, max_tokens=2000, max_retries=0)
    same(found)


run("instructor")
