"""Requests in the form of each agent program, of our own writing: what each sends first, and after a tool's result.

The texts are generated: a system text of some length, and tools with nested schemas, 24 of Claude Code and Codex.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.scripted import COMMAND, SAID

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = """
the file folder change test run read write line of a to in with before after each every only when shell output command
result error message plan step user code function module keep short exact path name never always check
"""
WORDS = TEXT.split()
ASKED = "Run the echo tool and say what it said."
# The scripted model then calls the tool without a text before.
CALL = f"Call bash {json.dumps({'command': COMMAND})}"
NOTE = "# Environment\nThe folder is a git repository, and the shell is bash."
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def prose(n: int, seed: int = 0) -> str:
    """Return n words in sentences."""
    rng, sentences = random.Random(seed), []
    words = [rng.choice(WORDS) for _ in range(n)]
    for at in range(0, n, 12):
        sentences.append(" ".join(words[at : at + 12]).capitalize() + ".")
    return "\n".join(sentences)


def schemas(shell: str, parameter: str, n: int = 24, words: int = 15) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the names, descriptions and schemas of n tools, of which the first is the shell."""
    command = {parameter: {"type": "string", "description": "The command."}, "timeout": {"type": "number"}}
    found = [(shell, f"Run a command.\n{prose(words)}", object_of(command, parameter))]
    for i in range(1, n):
        edit = object_of({"old": {"type": "string"}, "new": {"type": "string"}}, "old", "new")
        properties = {
            "path": {"type": "string", "description": prose(8, i)},
            "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "edits": {"type": "array", "items": edit, "minItems": 1},
        }
        found.append((f"tool_{i}", prose(words, i), object_of(properties, "path")))
    return found


def object_of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    return {**head, "properties": properties, "required": list(required), "additionalProperties": False}


def functions(shell: str, parameter: str, n: int = 6, **more: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions."""
    return [
        {"type": "function", "function": {"name": name, "description": about, "parameters": schema, **more}}
        for name, about, schema in schemas(shell, parameter, n)
    ]


# ---- what a client keeps of a stream ----


def chat_answer(events: Sequence[Any]) -> dict[str, Any]:
    """Return the message of a stream of chat completions."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(message["tool_calls"]):
                    call = {"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    message["tool_calls"].append(call)
                for key, text in piece["function"].items():
                    message["tool_calls"][piece["index"]]["function"][key] += text
    return message


def responses_answer(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the items of a stream of responses."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def messages_answer(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the blocks of a stream of messages."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "_json": ""})
        elif event["type"] == "content_block_delta":
            for key, text in event["delta"].items():
                if key != "type":
                    key = "_json" if key == "partial_json" else key
                    blocks[event["index"]][key] += text
    for block in blocks:
        written = block.pop("_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return blocks


# ---- the programs ----


@dataclass(frozen=True)
class Form:
    """The requests of a program.

    Attributes:
        path: the route of its API.
        first: returns the body of the first request.
        next: returns the body after an answer with a call, from the events of the answer and the body before.
        returns_reasoning: whether it sends the reasoning back.
    """

    path: str
    first: Callable[[], dict[str, Any]]
    next: Callable[[dict[str, Any], Sequence[Any]], dict[str, Any]]
    returns_reasoning: bool = True


def _next_chat(
    body: dict[str, Any], events: Sequence[Any], *, keep: Sequence[str] = ("reasoning_content",)
) -> dict[str, Any]:
    """Return the next body of a chat: the answer, with `keep` of what is optional, and the results of its calls."""
    answer = chat_answer(events)
    message = {key: answer[key] for key in ("role", *keep, "tool_calls")} | {"content": answer["content"] or None}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{SAID}\n"} for call in answer["tool_calls"]]
    return {**body, "messages": [*body["messages"], message, *results]}


def _claude_code() -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2.1.331.a3c; cc_entrypoint=sdk-cli;"
    system = [{"type": "text", "text": billing}, {"type": "text", "text": prose(200), **cached}]
    reminder = {"type": "text", "text": f"<system-reminder>\n{prose(40, 1)}\n</system-reminder>"}
    return {
        "model": "test-model",
        "max_tokens": 32_000,
        "stream": True,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "system": system,
        "messages": [
            {"role": "user", "content": [reminder, {"type": "text", "text": ASKED}]},
            {"role": "system", "content": [{"type": "text", "text": NOTE, **cached}]},
        ],
        "tools": [
            {"name": name, "description": about, "input_schema": schema}
            for name, about, schema in schemas("Bash", "command")
        ],
    }


def _next_claude_code(body: dict[str, Any], events: Sequence[Any]) -> dict[str, Any]:
    blocks = messages_answer(events)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": SAID, "is_error": False}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    results[-1]["cache_control"] = {"type": "ephemeral"}
    # The system message was a list of blocks, and is a text from now on.
    messages = [
        {**message, "content": NOTE} if message["role"] == "system" else message for message in body["messages"]
    ]
    new = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return {**body, "messages": [*messages, *new]}


def _codex() -> dict[str, Any]:
    flat = [
        {"type": "function", "name": name, "description": about, "strict": False, "parameters": schema}
        for name, about, schema in schemas("exec_command", "cmd")
    ]
    spaced = {"type": "namespace", "name": "agents_v1", "description": "Sub-agents.", "tools": flat[20:]}
    texts = [{"type": "input_text", "text": prose(100, seed)} for seed in (3, 4)]
    return {
        "model": "test-model",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "1",
        "client_metadata": {"session": "1"},
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": texts[:1]},
            {"type": "message", "id": "msg_2", "role": "developer", "content": texts},
            {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": NOTE}]},
            {"type": "message", "id": "msg_4", "role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        ],
        "tools": [*flat[:20], spaced, {"type": "web_search", "external_web_access": False}],
    }


def _next_codex(body: dict[str, Any], events: Sequence[Any]) -> dict[str, Any]:
    items = responses_answer(events)
    results = [
        {"type": "function_call_output", "id": f"fco_{i}", "call_id": item["call_id"], "output": f"Exit 0\n{SAID}"}
        for i, item in enumerate(items)
        if item["type"] == "function_call"
    ]
    return {**body, "input": [*body["input"], *items, *results]}


def _opencode() -> dict[str, Any]:
    messages = [{"role": "system", "content": prose(200)}, {"role": "user", "content": f'"{ASKED}"\n'}]
    limits = {"model": "test-model", "max_tokens": 8192, "tool_choice": "auto"}
    return {**limits, **STREAM, "messages": messages, "tools": functions("bash", "command")}


def _pi() -> dict[str, Any]:
    user = {"role": "user", "content": [{"type": "text", "text": CALL}]}
    limits = {"model": "test-model", "store": False, "max_completion_tokens": 8192, "reasoning_effort": "medium"}
    messages = [{"role": "developer", "content": prose(200)}, user]
    return {**limits, **STREAM, "messages": messages, "tools": functions("bash", "command", strict=False)}


def _cline() -> dict[str, Any]:
    texts = [("system", prose(200)), ("user", ASKED), ("user", "[SYSTEM] Go on until it is done.")]
    messages = [{"role": role, "content": text} for role, text in texts]
    common = {"model": "test-model", "tool_choice": "auto", **STREAM}
    return {**common, "messages": messages, "tools": functions("run_commands", "commands")}


def _continue() -> dict[str, Any]:
    messages = [{"role": "system", "content": prose(100)}, {"role": "user", "content": ASKED}]
    return {"model": "test-model", **STREAM, "messages": messages, "tools": functions("Bash", "command")}


def _vibe() -> dict[str, Any]:
    return {**_continue(), "temperature": 0.2, "tools": functions("bash", "command")}


def _next_vibe(body: dict[str, Any], events: Sequence[Any]) -> dict[str, Any]:
    found = _next_chat(body, events)
    *_, message, result = found["messages"]
    calls = [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]
    return {**found, "messages": [*body["messages"], {**message, "tool_calls": calls}, {**result, "name": "bash"}]}


def _gptme() -> dict[str, Any]:
    texts = [("system", prose(200)), ("user", ASKED), ("system", NOTE)]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    common = {"model": "test-model", "temperature": 0.0, "top_p": 0.1, **STREAM}
    return {**common, "messages": messages, "tools": functions("shell", "command")}


FORMS = {
    "claude-code": Form(MESSAGES, _claude_code, _next_claude_code),
    "codex": Form(RESPONSES, _codex, _next_codex),
    "opencode": Form(CHAT, _opencode, _next_chat),
    "pi": Form(CHAT, _pi, _next_chat),
    "cline": Form(CHAT, _cline, _next_chat),
    "continue": Form(CHAT, _continue, lambda body, events: _next_chat(body, events, keep=()), returns_reasoning=False),
    "vibe": Form(CHAT, _vibe, _next_vibe),
    "gptme": Form(CHAT, _gptme, lambda body, events: _next_chat(body, events, keep=()), returns_reasoning=False),
}
"""By the program whose requests have this form."""
