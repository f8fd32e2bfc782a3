"""smolagents: required calls, stop texts, and results that come back as text of the user."""

from __future__ import annotations

from asked import CALL, FINAL, MODEL, URL, get_weather
from checks import check, run
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@check
def tool_loop() -> None:
    model = OpenAIServerModel(MODEL, api_base=URL, api_key="none")
    agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, max_steps=3, verbosity_level=0)
    assert agent.run(CALL) == FINAL


run("smolagents")
