"""What all SDKs are asked: the scripted model does what a prompt says, see `agent` in tests/scripted.py."""

from __future__ import annotations

import json
import os

from pydantic import BaseModel

ROOT = os.environ["BASE_URL"]
URL = f"{ROOT}/v1"
MODEL = os.environ["MODEL"]
ARGUMENTS = {"city": "Paris", "days": 3}
WEATHER = "Sunny in Paris for 3 days."
CALL = f"What will the weather be?\nCall get_weather {json.dumps(ARGUMENTS)}"
TWICE = f'{CALL}\nCall get_weather {{"city": "Oslo", "days": 1}}'
# The last words of the scripted model, after a tool's result.
FINAL = "The tool said hello-from-tool, as it should."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Trip(BaseModel):
    """A typed answer."""

    city: str
    days: int


TRIP = Trip(city="Rome", days=5)
SAY_TRIP = f"Plan a trip.\nSay {TRIP.model_dump_json()}"


def get_weather(city: str, days: int) -> str:
    """Return the weather of a city.

    Args:
        city: the name of the city.
        days: how many days.
    """
    return f"Sunny in {city} for {days} days."
