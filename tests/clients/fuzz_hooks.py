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
    return fits(body, max(both, default=1)) and len(set(both)) < 2 and all(int(key) < VOCABULARY for key in bias)


def fits(body: dict[str, Any], limit: float) -> bool:
    """Return whether prompt and new tokens surely fit the context: a token has at least one byte."""
    n_messages = len(body.get("messages", ()))
    prompt = json.dumps(body.get("messages", body.get("prompt")), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(prompt) + PER_MESSAGE * n_messages + AROUND + limit <= CONTEXT
