"""The choice of tools: which tools an answer may or must call, and the grammar of such an answer.

An answer is constrained by a Lark grammar if a call is required, one tool is chosen, a tool is strict,
`parallel_tool_calls` is false, or a JSON Schema of the answer is given with the tools. The grammar is made from the
format strings of the model's calls (`formats.Written`). Other answers with tools are not constrained.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_engine.constraint import Constraint, check_schema, target
from mlx_engine.conversation.formats import Format, required_format
from mlx_engine.conversation.schemas import STRINGS, types_in
from mlx_engine.errors import OptionError, shown

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

Tool = Mapping[str, Any]

# A Lark expression for any text. It never matches the tokens that delimit parts of an answer.
TEXT = "/(?s:.*)/"


class ToolChoice(NamedTuple):
    """Which tools of a prompt an answer may or must call.

    Attributes:
        is_required: whether the answer must call a tool.
        name: the only tool that the answer may call; None for any tool.
        is_parallel: whether the answer may have several calls.
    """

    is_required: bool = False
    name: str | None = None
    is_parallel: bool = True

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None, *, is_parallel: bool = True) -> ToolChoice:
        """Convert the `tool_choice` of OpenAI's API: "auto", "none", "required", or an object with a name.

        The result for "none" is equal to the result for "auto", so for "none" the caller must leave out the tools.
        """
        name = None if given is None or isinstance(given, str) else str(given["function"]["name"])
        return cls(name is not None or given == "required", name, is_parallel)


def with_choice(
    content: Constraint | None, tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice
) -> Constraint | None:
    """Return the constraint of an answer to a prompt with tools; None if the answer is not constrained.

    `content` is the constraint of an answer without calls.

    Raises:
        OptionError: `tools` lacks the tool that `choice` names; a call is required, but `tools` is empty or `content`
            is given; there are tools, but `content` is not a JSON Schema; the format of the model's calls is unknown,
            or has no format strings; or the schema of a strict tool has a keyword that is not supported.
    """
    if choice.is_required and choice.name not in (None, *map(_name, tools)):
        message = f"tool_choice must name one of the tools, not {shown(choice.name)}"
        raise OptionError(message, option="tool_choice", expected="the name of a tool", found=choice.name)
    if not tools:
        if choice.is_required:
            raise OptionError("tool_choice needs tools", option="tool_choice", expected="tools", found="required")
        return content
    form = required_format(tokenizer)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not (choice.is_required or is_strict or not choice.is_parallel or content is not None):
        return None
    if content is not None and choice.is_required:
        message = "tool_choice: an answer that must be a call cannot have another constraint; leave one of the two out"
        raise OptionError(message, option="tool_choice", expected="auto or none", found="required")
    if content is not None and content.kind != "json_schema":
        message = f"tools: the constraint of an answer with tools must be a JSON Schema, not a {content.kind}"
        raise OptionError(message, option="tools", expected="a JSON Schema", found=content.kind)
    made = Constraint.grammar(grammar(tokenizer, form, tools, choice, None if content is None else content.text))
    # The grammar of gpt-oss includes the reasoning, which is in a channel. Other grammars apply after the reasoning.
    return made if form.name == "harmony" else made.after_reasoning()


def grammar(
    tokenizer: Tokenizer, form: Format, tools: Sequence[Tool], choice: ToolChoice, content: str | None = None
) -> str:
    """Return the Lark grammar of answers that may or must have calls.

    If `content` is not None, it is the JSON Schema of an answer without calls.

    Raises:
        OptionError: the format has no format strings, or the schema of a strict tool is not supported.
    """
    return _Grammar(tokenizer, form).of([t for t in tools if choice.name in (None, _name(t))], choice, content)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


class _Grammar:
    """The rules of a grammar. An *element* is a part of a rule: a token, literal, regular expression, rule or group."""

    def __init__(self, tokenizer: Tokenizer, form: Format) -> None:
        if form.written is None:
            message = f"tool_choice: this model's calls ({form.name}) can be read, but not demanded; use auto"
            raise OptionError(message, option="tool_choice", expected="auto or none", found=form.name)
        self._form, self._written, self._rules = form, form.written, list[str]()
        literals = tokenizer.special_tokens | tokenizer.user_defined_tokens
        self._tokens = {text: i for text, i in literals.items() if text and i in tokenizer.delimiter_ids}
        self._ends = [text for text, i in self._tokens.items() if i in tokenizer.eog_ids]

    def of(self, tools: Sequence[Tool], choice: ToolChoice, content: str | None) -> str:
        """Return the whole grammar."""
        written = self._written
        # `_call` joins the text before a call and the beginning of the call into one literal: `written.between` and
        # `written.after` may begin alike, and only the whole literal shows whether another call follows.
        another = " | ".join(self._call(tool, before=written.between) for tool in tools)
        several = f"({another})*" if choice.is_parallel and self._form.is_parallel else ""
        ending = f"{several} {self._text(written.after)}"
        first = " | ".join(self._call(tool, before=written.before) for tool in tools)
        calls = self._rule("calls", f"({first}) {ending}")
        if choice.is_required:
            answer = calls
        elif content is not None:
            answer = f"{calls} | {self._rule('content', f'%json {content}')}"
        else:
            answer = self._free(calls, tools, ending)
        if self._form.name == "harmony":
            answer = self._in_channels(answer if choice.is_required else calls, choice, content)
        return "\n".join([f"start: {answer}", *self._rules])

    def _free(self, calls: str, tools: Sequence[Tool], ending: str) -> str:
        """Return the elements that match any text, or any text and then calls.

        If calls begin with "{", the elements match either a text that does not begin with "{", or calls alone.
        """
        text = self._rule("text", TEXT)
        opening = self._opening()
        if opening in self._tokens:
            return f"{text} | {text} {calls}"
        if opening.startswith("{"):
            return f"{self._rule('text_first', '/([^{](?s:.*))?/')} | {calls}"
        # `head` is text that ends with the opening of the first call. `rest` is this call without its opening.
        head = self._rule("head[lazy]", f"{TEXT[:-1]}{_regex(opening)}/")
        rest = " | ".join(self._call(tool, before=self._written.before, without=opening) for tool in tools)
        return f"{text} | {head} ({rest}) {ending}"

    def _opening(self) -> str:
        """Return the text with which all calls begin: a token, or the text up to the first ">".

        If calls begin with "{", return their whole format string.
        """
        whole = self._written.before + self._written.call.replace("{{", "{")
        token = next((text for text in self._tokens if whole.startswith(text)), "")
        return token or (whole if whole.startswith("{") else whole[: whole.index(">") + 1])

    def _in_channels(self, answer: str, choice: ToolChoice, content: str | None) -> str:
        """Return the elements of an answer of gpt-oss: reasoning in its channel, then `answer`.

        If no call is required, a text in the channel `final` may take the place of `answer`.
        """
        thought = self._rule(
            "thought",
            f"{self._text('<|channel|>analysis<|message|>')} {TEXT} {self._text('<|end|><|start|>assistant')}",
        )
        if choice.is_required:
            return f"{thought}* {answer}"
        body = TEXT if content is None else f"%json {content}"
        final = self._rule("final", f"{self._text('<|channel|>final<|message|>')} {self._rule('body', body)}")
        return f"{thought}* ({answer} | {final})"

    def _rule(self, name: str, body: str) -> str:
        """Add a rule, and return its name, which is `name` with a number.

        If `name` ends with an option of Lark, as in "head[lazy]", the rule gets this option.
        """
        plain, _, options = name.partition("[")
        plain = f"{plain}_{len(self._rules)}"
        self._rules.append(f"{plain}{'[' + options if options else ''}: {body}")
        return plain

    def _text(self, text: str) -> str:
        """Return the elements that match a text: tokens for delimiters, and literals for the rest."""
        return " ".join(element for _, element in self._elements(text))

    def _elements(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each part of a text, and the element that matches it."""
        while text:
            places = [(at, -len(token), token) for token in self._tokens if (at := text.find(token)) >= 0]
            at, _, token = min(places, default=(len(text), 0, ""))
            if at:
                yield text[:at], json.dumps(text[:at], ensure_ascii=False)
            if token:
                yield token, f"<[{self._tokens[token]}]>"
            text = text[at + len(token) :]

    def _call(self, tool: Tool, *, before: str, without: str = "") -> str:
        """Add a rule that matches the text `before` and then a call of a tool; return the name of the rule.

        If the text begins with `without`, this beginning is left out, because another rule has matched it.
        """
        function, call = tool["function"], self._written.call
        for end in self._ends:  # an end-of-text token ends the answer and is not part of its grammar
            call = call.removesuffix(end)
        schema = _supported(function)
        fields: dict[str, Callable[[], str]] = {
            "name": lambda: self._text(function["name"]),
            "quoted": lambda: self._text(json.dumps(function["name"], ensure_ascii=False)),
            "arguments": lambda: self._arguments(schema, schema),
            "values": lambda: self._values(schema),
            "id": lambda: "/[A-Za-z0-9]{9}/",
            "index": lambda: "/[0-9]+/",
        }
        parts: list[str] = []
        for text, field, _, _ in string.Formatter().parse(call):
            parts.append(self._text(text if parts else (before + text).removeprefix(without)))
            parts.append(fields[field]() if field else "")
        return self._rule("call_of", " ".join(part for part in parts if part))

    def _arguments(self, schema: Any, root: Any) -> str:
        """Return the elements that match a call's arguments, or a value in them.

        The syntax is JSON, or a variant with the format's own delimiters of strings.
        """
        quotes = self._form.calls.get("content_args", {}).get("string_delims")
        if not quotes:
            return self._rule("json", f"%json {json.dumps(schema, ensure_ascii=False)}")
        schema, types = _plain(schema, root), types_in(schema, root)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return "(" + " | ".join(self._text(self._form.shown(value)) for value in values) + ")"
        if "properties" in schema or types == {"object"}:
            return f'"{{" {self._members(schema, root)} "}}"'
        if types == {"array"}:
            item = self._arguments(schema.get("items", {}), root)
            return f'"[" ({item} ("," {item})*)? "]"'
        if types <= STRINGS and types:
            return f"{self._text(quotes[0][0])} {self._rule('string', TEXT)} {self._text(quotes[0][1])}"
        scalars = sorted(types & {"integer", "number", "boolean", "null"}) or ["number", "boolean", "null"]
        plain = self._rule("scalar", f"%json {json.dumps({'type': scalars})}")
        return plain if types and "string" not in types else f"({plain} | {self._arguments({'type': 'string'}, root)})"

    def _members(self, schema: Any, root: Any) -> str:
        """Return the elements that match the members of an object whose keys have no quotes."""
        required = schema.get("required") or ()
        found = [
            (f"{json.dumps(key + ':', ensure_ascii=False)} {self._arguments(each, root)}", key in required)
            for key, each in schema.get("properties", {}).items()
        ]
        return self._sequence(found, '","')

    def _sequence(self, elements: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add a rule, and return its name. The rule matches the elements in order, with separators between them.

        `elements` has pairs (element, whether it is required). Elements that are not required may be missing.
        """
        # Add an alternative for each element that can be the first, because only the first element has no separator
        # before it.
        ways = []
        for i, (element, is_required) in enumerate(elements):
            after = (f"({separator} {each}){'' if needs else '?'}" for each, needs in elements[i + 1 :])
            ways.append(" ".join([element, *after]))
            if is_required:
                break
        else:
            ways.append('""')
        return self._rule("members", " | ".join(ways))

    def _values(self, schema: Any) -> str:
        """Return the elements that match all arguments in sequence, in tags or in Python's syntax."""
        found, required = [], schema.get("required") or ()
        for key, each in schema.get("properties", {}).items():
            before, _, after = self._written.value.partition("{value}")
            before = before.format(key=key)
            found.append((f"{self._text(before)} {self._value(each, schema, after)}", key in required))
        if self._form.calls["content"] == "python-calls":
            return self._sequence(found, '", "')
        return " ".join(f"({element}){'' if needs else '?'}" for element, needs in found)

    def _value(self, schema: Any, root: Any, after: str) -> str:
        """Return the elements that match a value and the text `after` it. If `after` is "", use Python's syntax."""
        plain, types = _plain(schema, root), types_in(schema, root)
        if not after:
            return self._python(plain, types)
        values = plain.get("enum", [plain["const"]] if "const" in plain else None)
        if values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(self._text(value) for value in values)}) {self._text(after)}"
        if types and types <= STRINGS:
            (text, _), *rest = self._elements(after)
            if text in self._tokens:
                return f"{self._rule('string', TEXT)} {self._text(after)}"
            end = self._rule("string[lazy]", f"{TEXT[:-1]}{_regex(text)}/")
            return " ".join([end, *(element for _, element in rest)])
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = self._rule("json", f"%json {json.dumps({**schema, **definitions}, ensure_ascii=False)}")
        return f"{value} {self._text(after)}"

    def _python(self, schema: Any, types: frozenset[str]) -> str:
        """Return the elements that match a value in Python's syntax. Lists and objects are written as in JSON."""
        text = r"""/"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/"""
        if "enum" in schema:
            return "(" + " | ".join(json.dumps(repr(value), ensure_ascii=False) for value in schema["enum"]) + ")"
        names = {"string": text, "boolean": '"True" | "False"', "null": '"None"', "integer": "/-?(0|[1-9][0-9]*)/"}
        ways = [names[kind] for kind in sorted(types) if kind in names]
        if not types or types & {"number", "array", "object"}:
            kinds = sorted(types & {"number", "array", "object"}) or ["number", "array", "object"]
            ways += [] if types else [text]
            ways.append(self._rule("json", f"%json {json.dumps({**schema, 'type': kinds}, ensure_ascii=False)}"))
        return "(" + " | ".join(ways) + ")"


def _plain(schema: Any, root: Any) -> Any:
    """Return a schema, or the schema to which its `$ref` refers; {} if this is not an object."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    found = target(reference, root) if isinstance(reference, str) else schema
    return found if isinstance(found, Mapping) else {}


def _supported(function: Mapping[str, Any]) -> Any:
    """Return the schema of a tool's arguments; raise OptionError if it is not supported and the tool is strict.

    If the schema is not supported and the tool is not strict, return a schema that allows any object. If a
    supported schema has `properties`, but neither `additionalProperties` nor `patternProperties`, the result forbids
    other arguments.
    """
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        check_schema(schema)
    except OptionError as error:
        if function.get("strict"):
            message = f"tools: the schema of {function['name']}, which is strict: {error}"
            raise OptionError(message, option="tools", found=function["name"]) from None
        return {"type": "object"}
    is_open = "properties" not in schema or "additionalProperties" in schema or "patternProperties" in schema
    return schema if is_open else {**schema, "additionalProperties": False}


def _regex(text: str) -> str:
    """Return the regular expression of a text, escaped for use between slashes."""
    return "".join(c if c.isalnum() or c in " _<>=:,\"'" else {"\n": "\\n"}.get(c, "\\" + c) for c in text)
