"""What a chat template reads: messages, tools, documents, and variables such as `enable_thinking`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mlx_engine.errors import ChatTemplateError, OptionError, shown
from mlx_engine.tokenizer.messages import (
    HALF,
    MAX_DEPTH,
    Message,
    for_template,
    is_json,
    map_texts,
    map_values,
    texts_of,
)

# Variables that every template gets from other places, so that no caller may set them.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns thinking on or off; DeepSeek's and Granite's templates have the second."""

# Where a comment, an expression or a statement begins; where one of the latter two ends.
BEGIN, END = re.compile(r"\{[#{%]"), re.compile(r"[%}]\}")
NAME = re.compile(r"[A-Za-z_]\w*")
# A name in code: attributes and quoted words do not count.
READ = re.compile(rf"(?<![.\w'\"]){NAME.pattern}(?![\w'\"])")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation and what else its template reads.

    Attributes:
        messages: see `messages.Message`.
        tools: descriptions of functions as JSON Schema, in the form of OpenAI's API.
        documents: mappings with the keys that the template reads, usually `title` and `text`.
        variables: other variables of the template, by name.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def for_template(self, template: str, where: str) -> TemplateInput:
        """Return the input of this template; `where` names the template's file.

        Raises:
            OptionError: a part has another form, or the template does not read one of the variables.
            ChatTemplateError: there are tools, documents or tool calls, and the template does not read them.
        """
        messages = for_template(self.messages, template, where)
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
        """Return the input with every text changed whose author is not the template or this program."""
        return TemplateInput(
            [map_texts(message, change) for message in self.messages],
            map_values(self.tools, change),
            map_values(self.documents, change),
            {name: map_values(value, change) for name, value in self.variables.items()},
        )

    def texts(self) -> list[str]:
        """Return the texts that `map_texts` changes."""
        return texts_of(self.map_texts)

    def names(self) -> dict[str, Any]:
        """Return the variables of the template, by name."""
        return {**self.variables, "messages": self.messages, "tools": self.tools, "documents": self.documents}


def reads(template: str, name: str) -> bool:
    """Return whether the code of a template has this name; attributes and quoted words do not count."""
    return name in _names(template)


@lru_cache(maxsize=8)
def _names(template: str) -> frozenset[str]:
    return frozenset(name for code in _code(template) for name in READ.findall(code))


def _code(template: str) -> Iterator[str]:
    """Yield the text of each expression and statement, in time linear in the template.

    One regular expression for both ends would search to the end of the text from every beginning that has none.
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
        else:  # it does not end: text, of which the second character may begin another
            at -= 1


def thinking(template: str | None, is_on: bool | None, option: str = "--think") -> dict[str, Any]:
    """Return the variables that turn thinking on or off; none for None.

    Raises:
        OptionError: the template has no such variable, or there is none.
    """
    if is_on is None:
        return {}
    name = next((name for name in SWITCHES if reads(template or "", name)), None)
    expected = f"a chat template that reads {' or '.join(SWITCHES)}"
    found = "no template" if template is None else "one that reads neither"
    if name is None:
        raise OptionError(option=option, expected=expected, found=found)
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
    """Check that a list holds JSON values, which are objects with `is_mapping`, in text that UTF-8 can write."""
    sound = isinstance(given, list | tuple) and all(isinstance(item, Mapping) or not is_mapping for item in given)
    sound = sound and all(is_json(item, MAX_DEPTH) for item in given)
    if not sound:
        expected = "a list of JSON objects" if is_mapping else "a JSON value"
        raise OptionError(f"{option} must be {expected}, not {shown(given)}", option=option, found=given)
    half = next((text for text in texts_of(lambda note: map_values(given, note)) if HALF.search(text)), None)
    if half is not None:
        raise OptionError(f"{option} has text that UTF-8 cannot write: {shown(half)}", option=option, found=half)
