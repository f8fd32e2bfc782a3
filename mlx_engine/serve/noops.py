"""Parameters of OpenAI's API that are not implemented, and the values of them that would change nothing.

A value that changes nothing is accepted. Any other value is refused, so that no client believes that it has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_engine.serve.errors import ApiError

# JSON Schemas of the values that change nothing. `without_noops` checks these, and `openapi.py` publishes them.
Schema = Mapping[str, Any]

ANY: Schema = {}


def _one_of(*values: object) -> Schema:
    return {"enum": [*values, None]}


# Labels, and hints for services with several users or machines, which do not affect the computation.
LABELS = {
    "user": ANY,
    "metadata": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
}

CHAT: Mapping[str, Schema] = {
    **LABELS,
    "audio": _one_of(),
    "function_call": _one_of("none", "auto"),
    "functions": _one_of([]),
    "modalities": _one_of(["text"]),
    "moderation": _one_of(),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
}

COMPLETIONS: Mapping[str, Schema] = {
    **LABELS,
    "best_of": _one_of(1),
    "suffix": _one_of(""),
}


EMBEDDINGS: Mapping[str, Schema] = {"user": ANY}
RERANK: Mapping[str, Schema] = {"user": ANY}


def without_noops(data: Mapping[str, Any], known: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the parameters of a request without those that change nothing.

    Raises:
        ApiError: a parameter that is not implemented has a value that would change something.
    """
    for name, schema in known.items():
        if not _changes_nothing(data.get(name), schema):
            message = f"{name}: this server does not implement this value of the parameter; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return {name: value for name, value in data.items() if name not in known}


def _changes_nothing(value: object, schema: Schema) -> bool:
    # JSON's true is not its 1, but Python's is.
    return "enum" not in schema or any(value == one and type(value) is type(one) for one in schema["enum"])
