"""Parameters of OpenAI's API that this server does not implement, and the values of them that change nothing.

A value that changes nothing is accepted. Any other value is refused, so that no client believes that it has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_engine.serve.errors import ApiError


def _any(value: object) -> bool:
    return True


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


# Labels, and hints for services that have several users or machines: they mean nothing to the computation.
LABELS = {
    "user": _any,
    "metadata": _any,
    "safety_identifier": _any,
    "prompt_cache_key": _any,
    "prompt_cache_retention": _any,
    "prompt_cache_options": _any,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
}

CHAT: Mapping[str, Callable[[object], bool]] = {
    **LABELS,
    "audio": _one_of(),
    "function_call": _one_of("none", "auto"),
    "functions": _one_of([]),
    "modalities": _one_of(["text"]),
    "moderation": _one_of(),
    "parallel_tool_calls": lambda value: isinstance(value, bool),  # there are no tools to call
    "prediction": _one_of(),
    "reasoning_effort": _one_of("medium"),
    "response_format": _one_of({"type": "text"}),
    "tool_choice": _one_of("none", "auto"),
    "tools": _one_of([]),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
}

COMPLETIONS: Mapping[str, Callable[[object], bool]] = {
    **LABELS,
    "best_of": lambda value: value == 1 and not isinstance(value, bool),
    "suffix": _one_of(""),
}


def without_noops(data: Mapping[str, Any], known: Mapping[str, Callable[[object], bool]]) -> dict[str, Any]:
    """Return the parameters of a request without those that change nothing.

    Raises:
        ApiError: a parameter that is not implemented has a value that would change something.
    """
    for name, changes_nothing in known.items():
        value = data.get(name)
        if value is not None and not changes_nothing(value):
            message = f"{name}: this server does not implement this value of the parameter; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return {name: value for name, value in data.items() if name not in known}
