"""Answers that the engine's model cannot give: code, tables, tool calls, refusals, and attacks on the page."""

from __future__ import annotations

import json
from typing import Any

from tests.page.app import Delta, error

CODE = """# A function

Some **bold** text and `code`.

```python
def f(x: str) -> str:
    return f"<b>{x}</b>"
```

| a | b |
|---|--:|
| 1 | 2 |

1. one
2. two
   - three

See [the page](https://example.org/x), and https://example.org/y.
"""

ATTACKS = {
    "script": "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'><svg/onload=alert(1)>",
    "links": "[a](javascript:alert(1)) [b](data:text/html,x) [c](JaVaScRiPt:alert(1)) [d](vbscript:x) <javascript:x> "
    "[e](java\tscript:alert(1)) [f](//example.org) [g](file:///etc/passwd) ![h](data:image/svg+xml,x)",
    "line": "x" * 100_000,
    "wide": "| a " * 300 + "|\n" + "|---" * 300 + "|\n" + ("| b " * 300 + "|\n") * 60,
    "rows": "| a | b |\n|---|---|\n" + "| c | d |\n" * 5_000,
    "quotes": "> " * 20_000 + "deep",
    "lists": "\n".join("  " * i + "- item" for i in range(250)),
    "fence": "```html\n<script>window.attacked = 1</script>\n" + "line\n" * 10_000,
    "stars": "*a **b " * 8_000,
    "brackets": "[" * 30_000 + "](" * 5_000,
    "ticks": "".join("`" * i + "x" for i in range(1, 250)),
}


def script(body: dict[str, Any]) -> Any:
    """Answer what the engine's model cannot: code, attacks, tool calls and refusals."""
    last = body["messages"][-1]
    text = last["content"]
    if "refuse tools" in text and "tools" in body:
        return error(400, "tools: this model's chat template has no tools; leave them out", param="tools")
    if last["role"] == "tool":
        return pieces(f"It is {json.loads(text)['celsius']} °C."), "stop"
    if body.get("tools"):
        arguments = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"city":', ' "Paris"}')]
        begin = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        return [
            *pieces("I look."),
            {"tool_calls": [begin]},
            *({"tool_calls": [one]} for one in arguments),
        ], "tool_calls"
    if text.startswith("attack "):
        return pieces(ATTACKS[text.removeprefix("attack ")], 997), "stop"
    if text.startswith("Write code"):
        return [{"reasoning_content": "Which *language*?"}, *pieces(CODE, 5)], "stop"
    if text.startswith("A blue bear"):
        return pieces("It slept."), "stop"
    if body.get("continue_final_message") and "no continuing" in body["messages"][0]["content"]:
        return error(400, "continue_final_message: the template begins with reasoning", param="continue_final_message")
    if body.get("continue_final_message"):
        return pieces(" And on."), "stop"
    return None


def pieces(text: str, n: int = 4) -> list[Delta]:
    return [{"content": text[i : i + n]} for i in range(0, len(text), n)]
