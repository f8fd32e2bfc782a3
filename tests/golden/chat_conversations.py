"""Ten conversations that chat templates are compared on: what `ChatPrompt` takes, by title."""

from __future__ import annotations

from typing import Any


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    """Return the description of a function, in the form of OpenAI's API."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def calls(*functions: tuple[str, Any], content: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a message with tool calls, each (name, arguments)."""
    each = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(functions)
    ]
    return {"role": "assistant", **({} if content is None else {"content": content}), "tool_calls": each, **more}


WEATHER = tool(
    "weather",
    'Return the weather of a "city" <today>.',
    city={"type": "string", "description": "Name of the city, e.g. Zürich"},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    days={"type": "array", "items": {"type": "integer"}, "minItems": 1},
)
CLOCK = tool("clock", "Return the time.", zone={"type": "string"})
SYSTEM, USER = message("system", "Be brief.\n"), message("user", "What is the weather in Zürich?")
CALL = calls(("weather", {"city": "Zürich", "unit": "celsius"}), content="")
RESULT = message("tool", '{"degrees": 21, "sky": "clear"}', tool_call_id="call00000", name="weather")
THOUGHT = message("assistant", "It is 21°.", reasoning_content="\nThe tool says 21.\n")
LONG = [
    message(role, f"{role} says {i}: " + "all work and no play. " * 5)
    for i in range(20)
    for role in ("user", "assistant")
]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "a system message and several turns": {
        "messages": [SYSTEM, USER, message("assistant", "Warm.\n"), message("user", " Thanks! ")],
    },
    "an empty system message": {"messages": [message("system", ""), USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, CLOCK]},
    "a call and its result": {"messages": [SYSTEM, USER, CALL, RESULT], "tools": [WEATHER]},
    "several calls": {
        "messages": [
            USER,
            calls(("weather", {"city": "Zürich", "days": [1, 2]}), ("clock", {"zone": "CET"}), content="Both, then."),
            RESULT,
            message("tool", "12:00", tool_call_id="call00001", name="clock"),
            message("assistant", "21° at noon."),
            message("user", "And tomorrow?"),
        ],
        "tools": [WEATHER, CLOCK],
    },
    "text parts": {
        "messages": [message("user", [{"type": "text", "text": "One "}, {"type": "text", "text": "two. <b>"}])],
    },
    "thinking": {
        "messages": [USER, THOUGHT, message("user", "Sure?")],
        "variables": {"enable_thinking": False, "thinking": False},
    },
    "characters": {
        "messages": [
            message("system", "Réponds en 日本語. \"'\\ {{ x }} {% y %} &amp; <b>"),
            message("user", "😀 é ﬁ \u200b\u2028 \t\n\n ١٢ </p>"),
        ],
    },
    "forty messages": {"messages": [SYSTEM, *LONG, USER], "documents": [{"title": "Zürich", "text": "A city."}]},
}
