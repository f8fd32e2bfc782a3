"""openai-agents: an agent with a tool and a typed answer, over chat completions and over responses."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from asked import CALL, FINAL, MODEL, SAY_TRIP, TRIP, URL, Trip, get_weather
from checks import check, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


@check
async def tool_loop() -> None:
    for kind in MODELS:
        model = kind(MODEL, AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
        agent = Agent(name="agent", instructions="Be brief.", tools=[function_tool(get_weather)], model=model)
        assert (await Runner.run(agent, CALL)).final_output.strip() == FINAL
        streamed = Runner.run_streamed(agent, CALL)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output.strip() == FINAL


@check
async def typed_answer() -> None:
    for kind in MODELS:
        model = kind(MODEL, AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
        agent = Agent(name="agent", output_type=Trip, model=model)
        assert (await Runner.run(agent, SAY_TRIP)).final_output == TRIP


run("openai-agents")
