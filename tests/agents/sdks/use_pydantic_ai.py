"""pydantic-ai: a tool, an answer typed by a tool that is required, and one typed by a schema; over all three APIs."""

from __future__ import annotations

from asked import CALL, FINAL, MODEL, ROOT, SAY_TRIP, TRIP, URL, Trip, get_weather
from checks import check, run
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

FINAL_RESULT = f"Plan a trip.\nCall final_result {TRIP.model_dump_json()}"


def models() -> list[Model]:
    openai = OpenAIProvider(base_url=URL, api_key="none")
    anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT, api_key="none"))
    return [OpenAIChatModel(MODEL, provider=openai), OpenAIResponsesModel(MODEL, provider=openai), anthropic]


@check
def tool_loop() -> None:
    for model in models():
        assert Agent(model, tools=[get_weather]).run_sync(CALL).output.strip() == FINAL


@check
def answer_typed_by_a_tool() -> None:
    for model in models():
        assert Agent(model, output_type=Trip).run_sync(FINAL_RESULT).output == TRIP


@check
def answer_typed_by_a_schema() -> None:
    for model in models()[:2]:
        assert Agent(model, output_type=NativeOutput(Trip)).run_sync(SAY_TRIP).output == TRIP


run("pydantic-ai-slim")
