"""Rewrite a conversation to the forms of messages that a chat template can render.

Clients send conversations in the form of OpenAI's API. Few templates can render every such conversation: some refuse a
system message in the middle, two turns of one role in a row, or two calls in one turn; others leave tool calls out. A
`Dialect` lists the forms that one template can render, and `rewritten` changes each message as little as possible.

A message does not change how earlier messages are rewritten, except that its text may be joined to the end of the
previous message. So the prefix cache can reuse the tokens of earlier messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mlx_engine.errors import OptionError, shown
from mlx_engine.tokenizer.chat_prompt import (
    MAX_DEPTH,
    Message,
    SpokenCalls,
    checked_messages,
    is_json,
    joined_parts,
)

Dict: TypeAlias = dict[str, Any]
WriteCalls: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str]
"""Gets tool calls in the form of OpenAI's API, and returns their text in the model's own format."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
INSTRUCTIONS = (SYSTEM, "developer")

# Matches the first line of Claude Code's system message, which `without_noise` removes.
NOISE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")

# The form of call ids that templates of Mistral's older models demand.
NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class Dialect:
    """The forms of messages that a chat template renders without loss.

    The defaults are the form of OpenAI's API, except that the arguments of calls are objects.

    Attributes:
        parts: whether a content may be a list of text parts. If False, the content is one text.
        head: whether a system message may be the first message. If False, its text is put at the beginning of the user
            message that follows directly. If none follows directly, the text becomes a user message.
        late: whether system messages may follow the first message. If False, system messages at the beginning are
            joined, and each later one becomes a user message in `<system-reminder>` tags.
        reminders: where a text in `<system-reminder>` tags is put after tool results: in a separate "message", or at
            the end of the last "result". Templates that need "result" treat every user message as a new question, and
            drop the reasoning before it.
        developer: whether there is a role `developer`. If False, the role becomes `system`.
        runs: which of the roles user and assistant may have several messages in a row. If `runs` lacks a role, adjacent
            messages of this role are joined.
        opening: whether the first message may be an answer. If False, an empty user message is put before it.
        after_results: where a user message that follows tool results is put: "after" the results; "after an answer": an
            empty answer is inserted between the results and the message; or "inside" the last result.
        calls: whether tool calls are a field of a message. If False, they are text in the model's own format.
        several: how several calls of one answer are written: in "one message"; "one each": in a message per call,
            followed by the result of the call; as "text" in the content of the answer; or as "plain text", which is
            "text" with the results in a user message.
        beside: how the calls of an answer with text are written: in "one message" with the text; "apart": in a message
            after the text; or as "text" or "plain text", see `several`.
        no_content: the form of the content of a message that has only calls: empty "text", "null", or "absent".
        json_text: whether arguments are JSON text. If False, they are an object.
        nine: whether the ids of calls must be nine letters or digits.
        reasoning: where the reasoning of an answer stands: in a "field" of the message, or in a "part" of its content.
        results: whether there is a role `tool`. If False, results are user messages in `<tool_response>` tags.
        bare_tools: whether tools may lack a description or parameters. If False, empty ones are added.
    """

    parts: bool = True
    head: bool = True
    late: bool = True
    reminders: Literal["message", "result"] = "message"
    developer: bool = True
    runs: frozenset[str] = frozenset({USER, ASSISTANT})
    opening: bool = True
    after_results: Literal["after", "after an answer", "inside"] = "after"
    calls: bool = True
    several: Literal["one message", "one each", "text", "plain text"] = "one message"
    beside: Literal["one message", "apart", "text", "plain text"] = "one message"
    no_content: Literal["text", "null", "absent"] = "text"
    json_text: bool = False
    nine: bool = False
    reasoning: Literal["field", "part"] = "field"
    results: bool = True
    bare_tools: bool = True


PLAINEST = Dialect(
    parts=False, head=False, late=False, developer=False, runs=frozenset(), opening=False, calls=False, results=False,
    bare_tools=False,
)  # fmt: skip
"""Alternating user messages and answers, and nothing else: every chat template can render these."""


def rewritten(messages: Sequence[Message], dialect: Dialect, write_calls: WriteCalls) -> list[Dict]:
    """Check the messages, and return them in the forms of the dialect.

    Every text, tool name and argument is kept, except the line that `without_noise` removes.
    """
    found = normal(messages)
    if not dialect.parts:
        found = [{**message, "content": joined_parts(message["content"])} for message in found]
    found = _instructions(found, dialect)
    found = _in_turns(_with_calls(found, dialect, write_calls), dialect)
    return [_with_reasoning(message) for message in found] if dialect.reasoning == "part" else found


def rewritten_tools(tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[Mapping[str, Any]]:
    """Return descriptions of tools without fields that are null, and with all fields that the dialect needs."""
    return [_tool(tool, dialect) for tool in tools]


def is_bare(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool, in the form of OpenAI's API, lacks a description, or parameters with `properties`."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return False
    parameters = function.get("parameters")
    return function.get("description") is None or not isinstance(parameters, Mapping) or "properties" not in parameters


def _tool(tool: Mapping[str, Any], dialect: Dialect) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    function = {key: value for key, value in function.items() if value is not None}
    parameters = function.get("parameters", {})
    if not dialect.bare_tools and isinstance(parameters, Mapping):
        needed = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}, **parameters}}
        function = {**needed, **{key: value for key, value in function.items() if key != "parameters"}}
    return {**tool, "function": function}


def normal(messages: Sequence[Message]) -> list[Dict]:
    """Check messages, and return them in one form, which does not depend on the client.

    An absent content is empty text, arguments of calls are objects, every call has an id, a result of a known call has
    the name of its tool, results are in the order of their calls, and system messages are changed by `without_noise`.

    Raise OptionError if `messages` is not a list of messages, or has a part or field that is not implemented.
    """
    found: list[Dict] = []
    names: dict[str, str] = {}
    for i, message in enumerate(checked_messages(messages)):
        made = {"content": "", **message}
        if made["role"] in INSTRUCTIONS:
            made["content"] = _clean(made["content"])
            if not made["content"] and message.get("content"):
                continue
        if made["role"] == ASSISTANT and not isinstance(made["content"], str):
            made |= _thoughts(made["content"])
        if "tool_calls" in made:
            at = f"messages[{i}].tool_calls"
            made["tool_calls"] = [
                _normal_call(call, len(names) + k, f"{at}[{k}]") for k, call in enumerate(made["tool_calls"])
            ]
            names |= {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        if made["role"] == TOOL and made.get("tool_call_id") in names:
            made.setdefault("name", names[made["tool_call_id"]])
        found.append(made)
    return _ordered(found)


def without_noise(text: str) -> str:
    """Return the text of a system message without the first line `x-anthropic-billing-header: ...` of Claude Code.

    The line differs from session to session, so the prefix cache could not reuse the tokens after it.
    """
    match = NOISE.match(text)
    return text[match.end() :] if match else text


def _clean(content: Any) -> Any:
    if isinstance(content, str):
        return without_noise(content)
    parts = [{**part, "text": without_noise(part["text"])} for part in content]
    return [part for part, given in zip(parts, content, strict=True) if part["text"] or not given["text"]]


def _thoughts(parts: Sequence[Mapping[str, Any]]) -> Dict:
    """Return two fields of an answer: its content without reasoning, and its reasoning; {} if it has no reasoning."""
    thoughts = [part["thinking"] for part in parts if "thinking" in part]
    content = {"content": [part for part in parts if "thinking" not in part] or ""}
    return {**content, "reasoning_content": "\n\n".join(thoughts)} if thoughts else {}


def _with_reasoning(message: Dict) -> Dict:
    """Return an answer with its reasoning as the first part of its content."""
    if not message.get("reasoning_content"):
        return message
    made = {key: value for key, value in message.items() if key != "reasoning_content"}
    content = made.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**made, "content": [{"type": "thinking", "thinking": message["reasoning_content"]}, *parts]}


def _normal_call(call: Mapping[str, Any], number: int, at: str) -> Dict:
    name, given = call["function"]["name"], call["function"].get("arguments") or {}
    arguments = _decoded(given) if isinstance(given, str) else given
    if not is_json(arguments, MAX_DEPTH):
        place = f"{at}.function.arguments"
        expected = f"JSON values, nested at most {MAX_DEPTH} deep"
        message = f"{place} must be {expected}, not {shown(given)}"
        raise OptionError(message, option="messages", expected=f"{place} to be {expected}", found=given)
    function = {"name": name, "arguments": arguments}
    return {"id": call.get("id") or f"call{number:05}", "type": "function", "function": function}


def _decoded(text: str) -> Mapping[str, Any]:
    """Return the object in a JSON text. Another value, or text that is not JSON, is returned as {"arguments": ...}."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, Mapping) else {"arguments": value}


def _ordered(messages: list[Dict]) -> list[Dict]:
    """Sort the results that follow an answer into the order of the answer's calls.

    Many templates do not write the ids of calls, so only the order shows to which call a result belongs.
    """
    found: list[Dict] = []
    places: dict[str, int] = {}

    def place(result: Dict) -> int:
        return places.get(result.get("tool_call_id", ""), len(places))

    for message in messages:
        if message["role"] != TOOL:
            places = {call["id"]: i for i, call in enumerate(message.get("tool_calls", ()))}
            found.append(message)
            continue
        at = len(found)
        while at and found[at - 1]["role"] == TOOL and place(found[at - 1]) > place(message):
            at -= 1
        found.insert(at, message)
    return found


# ---- instructions ----


def _instructions(messages: list[Dict], dialect: Dialect) -> list[Dict]:
    """Return the messages, with system and developer messages only in the forms and places that the dialect allows."""
    n_head = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))
    if not dialect.developer:
        messages = [{**m, "role": SYSTEM} if m["role"] in INSTRUCTIONS else m for m in messages]
    head, rest = messages[:n_head], messages[n_head:]
    if not dialect.late:
        head = [_one(head)] if head else []
        rest = _with_reminders(rest, dialect)
    if head and not dialect.head:
        first = [{**message, "role": USER} for message in head]
        is_asked = bool(rest) and rest[0]["role"] == USER
        return [_one([*first, rest[0]]), *rest[1:]] if is_asked else [_one(first), *rest]
    return head + rest


def _with_reminders(messages: list[Dict], dialect: Dialect) -> list[Dict]:
    found: list[Dict] = []
    for message in messages:
        if message["role"] not in INSTRUCTIONS:
            found.append(message)
            continue
        text = f"<system-reminder>\n{joined_parts(message['content'])}\n</system-reminder>"
        reminder = {"role": USER, "content": text}
        if found and found[-1]["role"] == TOOL and dialect.reminders == "result":
            found[-1] = {**found[-1], "content": _one([found[-1], reminder])["content"]}
        else:
            found.append(reminder)
    return found


def _one(messages: Sequence[Dict]) -> Dict:
    """Join messages to one message, with the role of the first."""
    if len(messages) == 1:
        return messages[0]
    found = {"role": messages[0]["role"], "content": ""}
    for message in messages:
        content = joined_parts(message.get("content") or "")
        before = f"{found['content']}\n\n" if found["content"] and content else found["content"]
        found["content"] = content.after(before) if isinstance(content, SpokenCalls) else before + content
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    more = {"reasoning_content": "\n\n".join(thoughts), "tool_calls": calls}
    return found | {key: value for key, value in more.items() if value}


# ---- calls and their results ----


def _with_calls(messages: list[Dict], dialect: Dialect, write_calls: WriteCalls) -> list[Dict]:
    found: list[Dict] = []
    for message, results in _rounds(messages):
        how = _how_called(message, dialect)
        is_spoken = how in ("text", "plain text")
        if is_spoken:
            message = _spoken(message, write_calls)
        elif "tool_calls" in message and joined_parts(message["content"]) and dialect.beside == "apart":
            found.append({"role": ASSISTANT, "content": message["content"]})
            message = {**message, "content": ""}
        if how == "one each":
            found += _one_each(message, results, dialect)
            continue
        found += [] if not message else [message if "tool_calls" not in message else _with_call_forms(message, dialect)]
        is_said = how == "plain text" or not dialect.results
        found += _said_results(results) if is_said else [_with_id(result, dialect) for result in results]
    return found


def _rounds(messages: list[Dict]) -> Iterator[tuple[Dict, list[Dict]]]:
    """Yield each message that is not a result, with the results that follow it.

    If the first messages are results, first yield {} with these results.
    """
    at = 0
    while at < len(messages):
        message = messages[at] if messages[at]["role"] != TOOL else {}
        at += bool(message)
        n = next((i for i, each in enumerate(messages[at:]) if each["role"] != TOOL), len(messages) - at)
        yield message, messages[at : at + n]
        at += n


def _how_called(message: Dict, dialect: Dialect) -> str:
    """Return how the calls of a message are written, as a value of `Dialect.several` or `Dialect.beside`."""
    calls = message.get("tool_calls", ())
    if not calls:
        return "one message"
    if not dialect.calls:
        return "text"
    if joined_parts(message["content"]) and dialect.beside in ("text", "plain text"):
        return dialect.beside
    return dialect.several if len(calls) > 1 else "one message"


def _spoken(message: Dict, write_calls: WriteCalls) -> Dict:
    """Return a message whose calls are written in its text, in the model's own format."""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": SpokenCalls(joined_parts(message["content"]), message["tool_calls"], write_calls)}


def _one_each(message: Dict, results: list[Dict], dialect: Dialect) -> list[Dict]:
    """Return a message for each call, followed by the result of the call. Results that belong to no call come last."""
    found: list[Dict] = []
    first, left = message, list(results)
    for call in message["tool_calls"]:
        found.append(_with_call_forms({**first, "tool_calls": [call]}, dialect))
        mine = [result for result in left if result.get("tool_call_id") == call["id"]][:1]
        found += [_with_id(result, dialect) for result in mine]
        left = [result for result in left if not any(result is each for each in mine)]
        first = {"role": ASSISTANT, "content": ""}
    return found + [_with_id(result, dialect) for result in left]


def _with_call_forms(message: Dict, dialect: Dialect) -> Dict:
    made = {**message, "tool_calls": [_call_form(call, dialect) for call in message["tool_calls"]]}
    if not joined_parts(made["content"]) and dialect.no_content != "text":
        del made["content"]
        return made if dialect.no_content == "absent" else {**made, "content": None}
    return made


def _call_form(call: Dict, dialect: Dialect) -> Dict:
    function = call["function"]
    if dialect.json_text:
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "id": _id_form(call["id"], dialect), "function": function}


def _with_id(message: Dict, dialect: Dialect) -> Dict:
    given = message.get("tool_call_id")
    return message if given is None else {**message, "tool_call_id": _id_form(given, dialect)}


def _id_form(given: str, dialect: Dialect) -> str:
    if not dialect.nine or NINE.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _said_results(results: list[Dict]) -> list[Dict]:
    """Return results as one user message; an empty list if there are no results."""
    texts = (f"<tool_response>\n{joined_parts(result['content'])}\n</tool_response>" for result in results)
    return [{"role": USER, "content": "\n".join(texts)}] if results else []


# ---- turns ----


def _in_turns(messages: list[Dict], dialect: Dialect) -> list[Dict]:
    """Join adjacent messages, and add empty messages, where the dialect needs it."""
    found: list[Dict] = []
    for message in messages:
        role, before = message["role"], found[-1] if found else {"role": None}
        if not found and role == ASSISTANT and not dialect.opening:
            found.append({"role": USER, "content": ""})
        elif role == USER and before["role"] == TOOL and dialect.after_results == "after an answer":
            found.append({"role": ASSISTANT, "content": ""})
        elif role == USER and before["role"] == TOOL and dialect.after_results == "inside":
            found[-1] = {**before, "content": _one([before, message])["content"]}
            continue
        is_run = role == before["role"] and role in (USER, ASSISTANT) and role not in dialect.runs
        is_beside = "tool_calls" in message and dialect.beside != "one message"
        if is_run and "tool_calls" not in before and not is_beside:
            found[-1] = _one([before, message])
        else:
            found.append(message)
    return found
