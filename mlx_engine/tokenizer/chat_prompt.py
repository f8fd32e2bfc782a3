"""The input of a chat template: messages in the form of OpenAI's API, tools, documents, and other variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from mlx_engine.errors import ChatTemplateError, OptionError, shown

Message: TypeAlias = Mapping[str, Any]
"""A role and a content. The content is text, or a list of parts `{"type": "text", "text": ...}`; the content of an
assistant may also have parts `{"type": "thinking", "thinking": ...}`. Other keys are `name`, `reasoning_content` (or
`reasoning`), `tool_calls` (of an assistant) and `tool_call_id` (of a tool)."""

ROLES = ("developer", "system", "user", "assistant", "tool")
"""The roles of OpenAI's API. Some templates have others."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot encode."""

TEXT_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning")
KEYS = {"role", "content", "tool_calls", *TEXT_KEYS}
CALL_KEYS = {"id", "type", "function", "index"}

ROLE = re.compile(r"[A-Za-z0-9_.-]+")

# Matches a loop over the parts of a content, as in templates of multimodal models.
READS_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+(\w+\.)?content\b|\bfor\s+\w+\s+in\s+\w+\[['"]content['"]\]""")

# The deepest nesting of arguments, tools, documents and variables; deeper nesting could overflow the stack of a parser.
MAX_DEPTH = 64


def messages_for_template(messages: Sequence[Message], template: str, where: str) -> list[dict[str, Any]]:
    """Return the messages in the form that this template expects; `where` names the template's file.

    If the template does not read parts, `joined_parts` replaces them by text. The role `developer` becomes `system`
    unless the template has the word `developer`. Absent fields (None, or an empty list) are left out, except a content
    of None in a message with calls.

    Raises:
        OptionError: `messages` is not a list of messages, or has a part or a field that is not implemented.
        ChatTemplateError: there are tool calls, and the template does not read them.
    """
    prepared = []
    has_developer, reads_parts = "developer" in template, READS_PARTS.search(template) is not None
    for given, present in zip(messages, checked_messages(messages), strict=True):
        content = present.get("content")
        if "content" in given and content is None and "tool_calls" in present:
            present["content"] = None  # some templates write calls only if the content is None
        if isinstance(content, list | tuple) and not reads_parts:
            present["content"] = joined_parts(content)
        if present["role"] == "developer" and not has_developer:
            present["role"] = "system"
        if "reasoning_content" in present:
            present["thinking"] = present["reasoning_content"]  # gpt-oss's name, as in transformers
        prepared.append(present)
    if "tool_calls" not in template and any("tool_calls" in message for message in prepared):
        hint = "leave out the tool calls, or use a model that is made for them"
        raise ChatTemplateError(where=where, found="one that does not read tool_calls", hint=hint)
    return prepared


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without absent fields (None, or an empty list); `reasoning` becomes `reasoning_content`.

    Raises:
        OptionError: `messages` is not a list of messages, or has a part or a field that is not implemented.
    """
    sound = isinstance(messages, Sequence) and not isinstance(messages, str | bytes) and len(messages) > 0
    sound = sound and all(isinstance(message, Mapping) for message in messages)
    _require(sound, "messages", 'a list of {"role": ..., "content": ...}', messages)
    found = []
    for i, message in enumerate(messages):
        present = {key: value for key, value in message.items() if value not in (None, [])}
        _check_message(present, f"messages[{i}]")
        reasoning = present.pop("reasoning", None)
        found.append(present if reasoning is None else {"reasoning_content": reasoning, **present})
    return found


def joined_parts(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content: its text parts joined with spaces, as in transformers' server."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content if "text" in part)


class SpokenCalls(str):
    """The content of an answer with its tool calls as text, in the model's own format.

    Control tokens in the syntax around the calls are encoded as control tokens, as if the template had written them.
    Control tokens in the text before the calls, in names or in arguments are encoded as plain text.
    """

    def __new__(cls, text: str, calls: Sequence[Mapping[str, Any]], write: Callable[..., str]) -> SpokenCalls:
        """Return `text` and, on the next line, the text of the calls, `write(calls)`."""
        written = STAND_IN.sub(lambda match: chr(int(match[1], 16)), write(calls))
        made = super().__new__(cls, f"{text}\n{written}" if text else written)
        made._given = text, calls, write
        return made

    _given: tuple[str, Sequence[Mapping[str, Any]], Callable[..., str]]

    def after(self, text: str) -> SpokenCalls:
        """Return the content with `text` before it."""
        own, calls, write = self._given
        return SpokenCalls(text + own, calls, write)

    def changed(self, change: Callable[[str], str]) -> SpokenCalls:
        """Apply `change` to the text before the calls, and to the names, ids and arguments of the calls."""
        text, calls, write = self._given
        return SpokenCalls(change(text) if text else "", _map(calls, change), write)


# Matches a high surrogate in the form in which `repr` escapes it. `chat.py` uses high surrogates as placeholders for
# characters, and `repr` formats the arguments of Python-style calls, so `SpokenCalls` undoes the escape.
STAND_IN = re.compile(r"(?<!\\)\\u(d[89ab][0-9a-f]{2})")


def map_texts(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with `change` applied to its texts, except its role and the values of keys "type".

    In the arguments of calls, `change` is applied to all texts and keys.
    """
    return {key: value if key == "role" else _map(value, change) for key, value in message.items()}


def texts(message: Message) -> list[str]:
    """Return the texts that `map_texts` changes."""
    return texts_of(lambda note: map_texts(message, note))


def texts_of(visit: Callable[[Callable[[str], str]], object]) -> list[str]:
    """Call `visit` with a function that records texts, and return the recorded texts."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    visit(note)
    return found


def map_values(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text and every key."""
    return _map(value, change, is_data=True)


def _map(value: Any, change: Callable[[str], str], *, is_data: bool = False) -> Any:
    """Return a value with `change` applied to its texts.

    `is_data` is true for arguments of calls, tools, documents and variables: then `change` is also applied to keys, and
    to the values of the key "type".
    """
    if isinstance(value, SpokenCalls):
        return value.changed(change)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map(item, change, is_data=is_data) for item in value]
    if not isinstance(value, Mapping):
        return value
    if is_data:
        return {change(key): _map(item, change, is_data=True) for key, item in value.items()}
    return {
        key: item if key == "type" else _map(item, change, is_data=key == "arguments") for key, item in value.items()
    }


def _check_message(message: Mapping[str, Any], at: str) -> None:
    """Check the fields of a message; `at` names the message in errors, as in "messages[3]"."""
    unknown = next((key for key in message if key not in KEYS), None)
    _require(unknown is None, at, f"a mapping with no other keys than {', '.join(sorted(KEYS))}", unknown)
    role = message.get("role")
    is_role = isinstance(role, str) and ROLE.fullmatch(role) is not None
    _require(is_role, f"{at}.role", f"{', '.join(ROLES)}, or another word of A-Z, a-z, 0-9, _, . and -", role)
    for key in TEXT_KEYS:
        _require(isinstance(message.get(key, ""), str), f"{at}.{key}", "text", message.get(key))
    calls = message.get("tool_calls", [])
    _require(not calls or role == "assistant", f"{at}.role", "assistant, for tool_calls", role)
    is_optional = bool(calls) or role == "tool" or any(key in message for key in ("reasoning_content", "reasoning"))
    is_answer = role == "assistant"
    _check_content(message.get("content"), f"{at}.content", is_optional=is_optional, is_answer=is_answer)
    _require(isinstance(calls, list | tuple), f"{at}.tool_calls", "a list", calls)
    for i, call in enumerate(calls):
        _check_call(call, f"{at}.tool_calls[{i}]")
    halves = next((text for text in texts(message) if HALF.search(text)), None)
    _require(halves is None, at, "text that UTF-8 can write", halves)


def _check_content(content: Any, at: str, *, is_optional: bool, is_answer: bool) -> None:
    if isinstance(content, str) or (content is None and is_optional):
        return
    is_list = isinstance(content, list | tuple) and len(content) > 0
    _require(is_list, at, 'text, or a list of {"type": "text", "text": ...}', content)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        kinds = ("text", "thinking") if is_answer else ("text",)
        expected = f"a part of type {' or '.join(kinds)} (no other type is implemented)"
        _require(isinstance(kind, str) and kind in kinds, f"{at}[{i}]", expected, kind)
        is_text = part.keys() == {"type", kind} and isinstance(part[kind], str)
        _require(is_text, f"{at}[{i}]", f'{{"type": "{kind}", "{kind}": ...}}', part)


def _check_call(call: Any, at: str) -> None:
    form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    function = call.get("function") if isinstance(call, Mapping) and call.keys() <= CALL_KEYS else None
    given = function if isinstance(function, Mapping) else {}
    sound = "name" in given and given.keys() <= {"name", "arguments"} and isinstance(given["name"], str)
    sound = sound and isinstance(call.get("id", ""), str) and call.get("type", "function") == "function"
    _require(sound, at, form, call)
    arguments = given.get("arguments") or {}  # some clients omit empty arguments
    sound = isinstance(arguments, str | Mapping) and is_json(arguments, MAX_DEPTH)
    _require(sound, f"{at}.function.arguments", "JSON text, or an object of JSON values", arguments)


def is_json(value: Any, depth: int) -> bool:
    """Return whether a value can be written as JSON, with objects and lists nested at most `depth` deep."""
    if isinstance(value, Mapping):
        inner = list(value.values())
        return depth > 0 and all(isinstance(k, str) for k in value) and all(is_json(v, depth - 1) for v in inner)
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_json(item, depth - 1) for item in value)
    return value is None or isinstance(value, str | int | float)


def _require(holds: bool, at: str, expected: str, found: object) -> None:
    if not holds:
        message = f"{at} must be {expected}, not {shown(found)}"
        raise OptionError(message, option="messages", expected=f"{at} to be {expected}", found=found)


# Variables that the engine sets; callers may not set them.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns thinking on or off: `thinking` in DeepSeek's and Granite's templates."""

# In a template, BEGIN matches the beginning of a comment, an expression or a statement, and END matches the end of an
# expression or a statement.
BEGIN, END = re.compile(r"\{[#{%]"), re.compile(r"[%}]\}")
NAME = re.compile(r"[A-Za-z_]\w*")
# Matches a name in code that is neither an attribute nor quoted.
READ = re.compile(rf"(?<![.\w'\"]){NAME.pattern}(?![\w'\"])")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, and the other inputs of its template.

    Attributes:
        messages: a list of `Message`.
        tools: descriptions of functions as JSON Schema, in the form of OpenAI's API.
        documents: mappings with the keys that the template reads, usually `title` and `text`.
        variables: maps the names of other variables of the template to their values.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def for_template(self, template: str, where: str) -> TemplateInput:
        """Return the input of this template; `where` names the template's file.

        Raises:
            OptionError: a part of the prompt has an invalid form, or the template does not read one of the variables.
            ChatTemplateError: there are tools, documents or tool calls, and the template does not read them.
        """
        messages = messages_for_template(self.messages, template, where)
        _check_variables(self.variables, template)
        for name in ("tools", "documents"):
            given = getattr(self, name)
            _check_data(name, given)
            if given and not reads(template, name):
                hint = f"leave out the {name}, or use a model that is made for them"
                raise ChatTemplateError(where=where, found=f"one that does not read {name}", hint=hint)
        return TemplateInput(messages, list(self.tools) or None, list(self.documents) or None, dict(self.variables))


@dataclass(frozen=True)
class TemplateInput:
    """The checked input of a template; absent tools and documents are None, as transformers passes them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    documents: list[Any] | None
    variables: dict[str, Any]

    def map_texts(self, change: Callable[[str], str]) -> TemplateInput:
        """Return the input with `change` applied to every text, except the roles and types in messages."""
        return TemplateInput(
            [map_texts(message, change) for message in self.messages],
            map_values(self.tools, change),
            map_values(self.documents, change),
            {name: map_values(value, change) for name, value in self.variables.items()},
        )

    def texts(self) -> list[str]:
        """Return the texts to which `map_texts` applies its function."""
        return texts_of(self.map_texts)

    def names(self) -> dict[str, Any]:
        """Return a map from the names of the template's variables to their values."""
        return {**self.variables, "messages": self.messages, "tools": self.tools, "documents": self.documents}


def reads(template: str, name: str) -> bool:
    """Return whether the code of a template has this name; attributes and quoted words do not count."""
    return name in _names(template)


@lru_cache(maxsize=8)
def _names(template: str) -> frozenset[str]:
    return frozenset(name for code in _code(template) for name in READ.findall(code))


def _code(template: str) -> Iterator[str]:
    """Yield the text of each expression and statement, in linear time.

    A single regular expression that finds all of them would take quadratic time.
    """
    last_comment, last = template.rfind("#}"), max(template.rfind("%}"), template.rfind("}}"))
    at = 0
    while begin := BEGIN.search(template, at):
        at = begin.end()
        if begin[0] == "{#" and at <= last_comment:
            at = template.index("#}", at) + 2
        elif begin[0] != "{#" and at <= last and (end := END.search(template, at)):
            yield template[at : end.start()]
            at = end.end()
        else:  # a beginning without an end is text; its second character may begin another part
            at -= 1


def thinking(template: str | None, is_on: bool | None, option: str = "--think") -> dict[str, Any]:
    """Return the variable that turns thinking on or off, with its value; an empty dict if `is_on` is None.

    Raises:
        OptionError: the template has no such variable.
    """
    if is_on is None:
        return {}
    name = next((name for name in SWITCHES if reads(template or "", name)), None)
    if name is None:
        needs = f"{option} needs a chat template that reads {' or '.join(SWITCHES)}"
        found = "there is none" if template is None else "this one reads neither"
        raise OptionError(f"{needs}; {found}", option=option, found=is_on)
    return {name: is_on}


def _check_variables(variables: Mapping[str, Any], template: str) -> None:
    option = "chat_template_kwargs"
    sound = isinstance(variables, Mapping) and all(isinstance(name, str) for name in variables)
    if not sound:
        message = f"{option} must map names to values, not be {shown(variables)}"
        raise OptionError(message, option=option, found=variables)
    for name, value in variables.items():
        if name in RESERVED:
            raise OptionError(f"{option} cannot set {name}", option=option, found=name)
        if NAME.fullmatch(name) is None or not reads(template, name):
            message = f"{option} has {shown(name)}, which the model's chat template does not read"
            raise OptionError(message, option=option, found=name)
        _check_data(f"{option}.{name}", [value], is_mapping=False)


def _check_data(option: str, given: Any, *, is_mapping: bool = True) -> None:
    """Check that a list has only JSON values with text that UTF-8 can encode; with `is_mapping`, only objects."""
    sound = isinstance(given, list | tuple) and all(isinstance(item, Mapping) or not is_mapping for item in given)
    sound = sound and all(is_json(item, MAX_DEPTH) for item in given)
    if not sound:
        expected = "a list of JSON objects" if is_mapping else "a JSON value"
        raise OptionError(f"{option} must be {expected}, not {shown(given)}", option=option, found=given)
    half = next((text for text in texts_of(lambda note: map_values(given, note)) if HALF.search(text)), None)
    if half is not None:
        raise OptionError(f"{option} has text that UTF-8 cannot write: {shown(half)}", option=option, found=half)
