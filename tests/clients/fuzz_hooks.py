"""What no JSON Schema can say about requests, for schemathesis: such requests are no valid examples.

Invalid examples are left as they are. schemathesis loads this file in its own environment.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

# Of the built-in model.
CONTEXT, VOCABULARY = 512, 2048
# Tokens that the chat template adds to a message, and to the whole.
PER_MESSAGE, AROUND = 40, 40


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Return whether to keep an example."""
    if case.meta.generation.mode != schemathesis.GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return True
    body = case.body
    both = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    bias = body.get("logit_bias") or {}
    is_bound = "/v1/messages" in case.path or "/v1/responses" in case.path  # more tokens than fit may be asked for
    limit = 1 if is_bound else max(both, default=1)
    is_plain = not is_bound or is_without_tools(body)
    return is_plain and fits(body, limit) and len(set(both)) < 2 and all(int(key) < VOCABULARY for key in bias)


def is_without_tools(body: dict[str, Any]) -> bool:
    """Return whether a request has no tools, calls and schemas: what is valid depends on the model's template."""
    text = json.dumps(body)
    forms = (body.get("text") or {}, body.get("output_config") or {})
    is_free = not any(form.get("format") for form in forms) and not any(body.get(k) for k in ("tools", "tool_choice"))
    return is_free and not any(kind in text for kind in ("tool_use", "tool_result", "function_call", "thinking"))


PROMPTS = ("messages", "prompt", "input", "system", "instructions")


def fits(body: dict[str, Any], limit: float) -> bool:
    """Return whether prompt and new tokens surely fit the context: a token has at least one byte."""
    given = [body.get(name) for name in PROMPTS]
    n_messages = sum(len(one) for one in given if isinstance(one, list))
    prompt = json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(prompt) + PER_MESSAGE * n_messages + AROUND + limit <= CONTEXT
