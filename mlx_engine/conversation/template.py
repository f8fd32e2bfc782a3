"""Render a conversation with a chat template, in a form that the template supports, without losing any message part.

`dialect_of` renders short test conversations once, to find the template's *dialect*: the forms of messages that the
template writes without loss. A conversation that most templates support is first rendered unchanged; any other one is
rewritten to these forms. Then every text, tool name and argument is searched for in the prompt. If a part is missing,
other forms are tried, the plainest last. If a part is missing in every form, an error names the part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from mlx_engine.conversation.delimiters import MARKERS
from mlx_engine.conversation.dialect import (
    ASSISTANT,
    INSTRUCTIONS,
    PLAINEST,
    SYSTEM,
    TOOL,
    USER,
    Dialect,
    is_bare,
    rewritten,
    rewritten_tools,
)
from mlx_engine.conversation.formats import format_of
from mlx_engine.errors import ChatTemplateError, shown
from mlx_engine.tokenizer import chat
from mlx_engine.tokenizer.chat import Check, History, unchecked
from mlx_engine.tokenizer.chat_prompt import ChatPrompt, Message, reads
from mlx_engine.tokenizer.sandbox_process import DEFAULT_LIMITS, Limits
from mlx_engine.tokenizer.tokenizer import Tokenizer


def chat_ids(
    tokenizer: Tokenizer,
    prompt: ChatPrompt | Sequence[Message],
    history: History | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    check: Check = unchecked,
) -> list[int]:
    """Return the ids of a conversation, up to the model's answer. Arguments: see `tokenizer.chat.chat_ids`.

    Raises:
        OptionError: the messages are not a list of messages, or the template does not read one of `prompt.variables`.
        ChatTemplateError: there is no template, it exceeds its limits, or a part of the conversation is missing from
            the prompt in every form.
        TokenizerError: the vocabulary cannot encode the text.
    """
    prompt = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)
    problem: ChatTemplateError | None = None
    tried: list[ChatPrompt] = []
    for dialect in _dialects(tokenizer, prompt):
        messages = rewritten(prompt.messages, dialect, partial(written_calls, tokenizer))
        written = replace(prompt, messages=messages, tools=_tools(prompt, dialect))
        if written in tried:
            continue
        tried.append(written)
        try:
            accept = accepts(written, tokenizer.where)
            return chat.chat_ids(tokenizer, written, history, limits=limits, check=check, accept=accept)
        except ChatTemplateError as error:
            if not error.is_refusal:
                raise
            problem = problem or error
    assert problem is not None  # noqa: S101 - there is at least one dialect
    raise problem


def written_calls(tokenizer: Tokenizer, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as text in the model's format. If that is unknown or not writable, use the most common format."""
    form = format_of(tokenizer)
    return _in_tags(calls) if form is None or form.written is None else form.write(calls)


def _in_tags(calls: Sequence[Mapping[str, Any]]) -> str:
    each = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in each)


def _tools(prompt: ChatPrompt, dialect: Dialect) -> Sequence[Mapping[str, Any]]:
    is_list = isinstance(prompt.tools, list | tuple)  # any other value is refused later, by an error that names it
    return rewritten_tools(prompt.tools, dialect) if is_list else prompt.tools


def _dialects(tokenizer: Tokenizer, prompt: ChatPrompt) -> Iterator[Dialect]:
    """Yield the dialects to try, beginning with those that change the messages least."""
    # Most templates can write alternating user and assistant texts unchanged. If this template can, the test
    # conversations need not be rendered.
    if _is_common(prompt):
        yield Dialect()
    if tokenizer.chat_template is not None:
        yield dialect_of(tokenizer)
    yield PLAINEST


def _is_common(prompt: ChatPrompt) -> bool:
    """Return whether the messages are alternating user and assistant texts, perhaps after a system message.

    Return False if there are tool calls, reasoning, or a tool without a description or parameters.
    """
    messages = prompt.messages
    try:
        if any(is_bare(tool) for tool in prompt.tools):
            return False
        roles = [message["role"] for message in messages]
        are_texts = all(isinstance(message.get("content"), str) for message in messages)
        has_more = any(message.get(key) for message in messages for key in ("tool_calls", *REASONING))
    except (AttributeError, KeyError, TypeError):
        return True  # a value is wrong: rendering refuses it with an error that names it
    turns = roles[1:] if roles[:1] == [SYSTEM] else roles
    return are_texts and not has_more and all(role == (USER, ASSISTANT)[i % 2] for i, role in enumerate(turns))


REASONING = ("reasoning_content", "reasoning")


# ---- the check ----


def accepts(prompt: ChatPrompt, where: str) -> Check:
    """Return a function that raises ChatTemplateError if a part of the prompt is missing from a text; see `lost`."""

    def accept(text: str) -> None:
        part = lost(prompt, text)
        if part is not None:
            found = f"one that leaves out {part}"
            hint = "leave this part out, or use a model whose template writes it"
            raise ChatTemplateError(where=where, found=found, hint=hint, is_refusal=True)

    return accept


def lost(prompt: ChatPrompt, text: str) -> str | None:
    """Return the first part of a conversation that is missing from its rendered text; None if all parts are there.

    Parts are texts, names of tools, and the names and values of arguments. In the text, a part may be unchanged or in
    JSON's or Python's syntax. The parts must be in the order of their messages, except instructions (system and
    developer messages), which templates may move. White space at the ends of a text is ignored. Reasoning is not
    searched for, because templates drop earlier reasoning.
    """
    for i, tool in enumerate(prompt.tools):
        name = tool.get("function", tool).get("name", "") if isinstance(tool.get("function", tool), Mapping) else ""
        if _end(text, name, 0) is None:
            return f"tools[{i}] ({shown(name)})"
    at = 0
    for i, message in enumerate(prompt.messages):
        is_moved = message["role"] in INSTRUCTIONS
        begin = 0 if is_moved else at
        for place, part in _parts(message):
            end = _end(text, part, begin)
            if end is None:
                return f"messages[{i}].{place} (role {message['role']}): {shown(part)}"
            at = at if is_moved else max(at, end)
    return None


def _parts(message: Message) -> Iterator[tuple[str, Any]]:
    content = message.get("content") or ""
    if isinstance(content, str):
        yield "content", _without_reasoning(content) if message["role"] == ASSISTANT else content
    else:
        for i, part in enumerate(content):
            yield f"content[{i}]", part.get("text", "")
    for i, call in enumerate(message.get("tool_calls") or ()):
        function, place = call["function"], f"tool_calls[{i}].function"
        yield f"{place}.name", function["name"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        yield from ((f"{place}.arguments", leaf) for leaf in _leaves(arguments))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and the scalars in a JSON value."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _without_reasoning(text: str) -> str:
    for markers in MARKERS:
        _, closing, rest = text.rpartition(markers.closing)
        if closing:
            return rest
    return text


def _end(text: str, part: Any, begin: int) -> int | None:
    """Find a part, unchanged or in JSON's or Python's syntax, from `begin` on; return the index of its end, or None."""
    if isinstance(part, str):
        part = part.strip()
        if (at := text.find(part, begin)) >= 0:
            return at + len(part)
        forms = {json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], repr(part)[1:-1]}
    else:
        forms = {json.dumps(part), str(part)}
    ends = [at + len(form) for form in forms if (at := text.find(form, begin)) >= 0]
    return min(ends, default=None)


# ---- the forms that a template supports ----

# Maps a tokenizer and the text of its chat template to the template's dialect.
_KNOWN: WeakKeyDictionary[Tokenizer, dict[str, Dialect]] = WeakKeyDictionary()


def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """Return the dialect of the tokenizer's chat template. It is determined once per template.

    Raises:
        ChatTemplateError: there is no template, or it exceeds its limits.
    """
    known, template = _KNOWN.setdefault(tokenizer, {}), tokenizer.chat_template or ""
    if template not in known:
        known[template] = _Probe(tokenizer).dialect()
    return known[template]


# The texts of the test conversations. No template contains them, so a text that is found in a prompt is from a message.
HEAD, ASKED, LATE, ANSWERED, NEXT, AGAIN, RESULT, OTHER, THOUGHT = (
    f"probe{word}" for word in ("head", "asked", "late", "answered", "next", "again", "result", "other", "thought")
)
NAMES = ("probe_tool", "probe_other_tool")
ARGUMENTS = {"probecity": "probeparis", "probeflag": True, "probedeep": {"probedays": [70911, 2.5]}}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": NAMES[0],
        "description": "Test.",
        "parameters": {"type": "object", "properties": {"probecity": {"type": "string", "description": "A city."}}},
    },
}


def _said(*roles_and_texts: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in roles_and_texts]


def _called(*names: str, text: str = "", **more: str) -> list[dict[str, Any]]:
    """Return a question, an answer with calls, and the results of the calls."""
    made = [
        {"id": f"probe_call_{i}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for i, name in enumerate(names)
    ]
    results = [
        {"role": TOOL, "content": content, "tool_call_id": call["id"]}
        for call, content in zip(made, (RESULT, OTHER), strict=False)
    ]
    return [*_said((USER, ASKED)), {"role": ASSISTANT, "content": text, "tool_calls": made, **more}, *results]


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


ENDED = _said((ASSISTANT, ANSWERED), (USER, NEXT))
Step: TypeAlias = "tuple[Callable[[Dialect], list[Dialect]], list[list[dict[str, Any]]]]"
"""A pair: a function that returns candidates for the dialect, and the conversations that test them. It gets the dialect
found so far. The candidates are copies of this dialect with changed fields, the preferred one first."""


def _one_of(name: str, *values: Any) -> Callable[[Dialect], list[Dialect]]:
    return lambda known: [replace(known, **{name: value}) for value in values]


def _call_forms(known: Dialect) -> list[Dialect]:
    """Return a candidate for every form of calls and their results."""
    names = ("results", "nine", "no_content", "json_text")
    forms: Iterator[tuple[Any, ...]] = product((True, False), (False, True), NO_CONTENT, (False, True))
    fields = [replace(known, **dict(zip(names, form, strict=True))) for form in forms]
    return [*fields, *(replace(known, calls=False, results=results) for results in (True, False))]


NO_CONTENT = ("text", "null", "absent")
RUNS = [frozenset(roles) for roles in ((USER, ASSISTANT), (ASSISTANT,), (USER,), ())]
STEPS: list[Step] = [
    (
        _one_of("head", True, False),
        [_said((SYSTEM, HEAD), (USER, ASKED)), _said((SYSTEM, HEAD), (USER, ASKED)) + ENDED],
    ),
    (_one_of("developer", True, False), [_said(("developer", HEAD), (USER, ASKED))]),
    (
        _one_of("runs", *RUNS),
        [
            _said((USER, ASKED), (USER, AGAIN), (ASSISTANT, ANSWERED), (USER, NEXT)),
            _said((USER, ASKED), (ASSISTANT, ANSWERED), (ASSISTANT, AGAIN), (USER, NEXT)),
        ],
    ),
    (_one_of("opening", True, False), [_said((ASSISTANT, ANSWERED), (USER, ASKED))]),
    (_call_forms, [_called(NAMES[0]), _called(NAMES[0]) + ENDED]),
    (_one_of("several", "one message", "one each", "text", "plain text"), [_called(*NAMES), _called(*NAMES) + ENDED]),
    (
        _one_of("beside", "one message", "apart", "text", "plain text"),
        [_called(NAMES[0], text=AGAIN), _called(NAMES[0], text=AGAIN) + ENDED],
    ),
    (
        _one_of("parts", True, False),
        [_in_parts(_said((USER, ASKED)) + ENDED), _in_parts(_called(NAMES[0], text=AGAIN))],
    ),
    (_one_of("reasoning", "field", "part"), [_called(NAMES[0], reasoning_content=THOUGHT)]),
    (
        _one_of("after_results", "after", "after an answer", "inside"),
        [_called(NAMES[0]) + _said((USER, AGAIN)), _called(NAMES[0]) + _said((USER, AGAIN)) + ENDED],
    ),
    (
        _one_of("late", True, False),
        [
            _said((SYSTEM, HEAD), (SYSTEM, OTHER), (USER, ASKED)),
            _said((SYSTEM, HEAD), (USER, ASKED), (SYSTEM, LATE)),
            _said((SYSTEM, HEAD), (USER, ASKED), (SYSTEM, LATE)) + ENDED,
            _said((SYSTEM, HEAD)) + _called(NAMES[0]) + _said((SYSTEM, LATE)),
        ],
    ),
    (
        _one_of("reminders", "message", "result"),
        [_called(NAMES[0], reasoning_content=THOUGHT) + _said((SYSTEM, LATE))],
    ),
]


class _Probe:
    """Finds the dialect of a tokenizer's chat template by rendering the test conversations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        self._tools = [PROBE_TOOL] if reads(template, "tools") else []
        self._has_calls = "tool_calls" in template

    def dialect(self) -> Dialect:
        """Return the dialect of the template. Each step begins with the dialect that earlier steps have found."""
        found = self._with_tools(Dialect(calls=self._has_calls))
        for candidates, conversations in STEPS:
            found = self._first(candidates(found), conversations)
        return found

    def _with_tools(self, known: Dialect) -> Dialect:
        if not self._tools:
            return known
        (question,) = _said((USER, ASKED))
        candidates = [replace(known, bare_tools=True), replace(known, bare_tools=False)]
        bare: list[Mapping[str, Any]] = [{"type": "function", "function": {"name": NAMES[0]}}]
        prompts = [ChatPrompt([question], tools=rewritten_tools(bare, each)) for each in candidates]
        texts = chat.render_each(self._tokenizer, prompts)
        return candidates[0] if self._mark(prompts[0], texts[0]) == SOUND else candidates[1]

    def _first(self, candidates: list[Dialect], conversations: list[list[dict[str, Any]]]) -> Dialect:
        """Return the candidate with the best mark; of candidates with equal marks, the first.

        The mark of a candidate is the worst `_mark` of its conversations. If every candidate has the mark FAILED,
        return the last one.
        """
        candidates = [each for each in candidates if self._has_calls or not each.calls]
        prompts = [
            ChatPrompt(rewritten(messages, candidate, _in_tags), tools=self._tools)
            for candidate in candidates
            for messages in conversations
        ]
        texts = iter(chat.render_each(self._tokenizer, prompts))
        marks = [self._mark(prompt, next(texts)) for prompt in prompts]
        n = len(conversations)
        ranks = [max(marks[i * n : (i + 1) * n]) for i in range(len(candidates))]
        best = min(ranks)
        return candidates[-1] if best == FAILED else candidates[ranks.index(best)]

    def _mark(self, prompt: ChatPrompt, text: str | None) -> int:
        """Return SOUND, ODD or FAILED for a rendered prompt; `text` is None if the template refuses the prompt."""
        if text is None or lost(prompt, text) is not None:
            return FAILED
        is_shown = any(f"'type': '{kind}'" in text for kind in ("text", "thinking"))  # text parts in Python's syntax
        is_moved = 0 <= text.find(LATE) < text.find(ASKED)
        is_odd = "{'probecity'" in text or r"\"probecity" in text  # an object in Python's syntax; quoted JSON
        is_thoughtless = THOUGHT not in text and THOUGHT in str(prompt.messages)
        return FAILED if is_moved or is_shown else ODD if is_odd or is_thoughtless else SOUND


# ODD: no part is lost, but arguments are in Python's syntax or in quoted JSON, or the reasoning is missing. FAILED: the
# template refuses the messages, loses or moves a part, or writes text parts in Python's syntax. SOUND: neither.
SOUND, ODD, FAILED = range(3)
