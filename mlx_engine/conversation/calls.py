"""Parse tool calls while an answer is generated. Arguments in JSON, tags, lines or Python's syntax become JSON text.

Used by `answer.AnswerReader`. The parsing functions are generators: they yield when they need more text.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from mlx_engine.conversation.delimiters import MARK, Delimiter, _More
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, Event, TextDelta
from mlx_engine.conversation.formats import AnswerFormat, CallForm
from mlx_engine.conversation.schemas import STRINGS, Types, json_of, types_of

Emit = Callable[[str], object]
Reading = Generator[None, None, None]

# Characters that a JSON string may have unescaped, except MARK, which stands before each control token.
PLAIN = re.compile(rf'[^"\\\x00-\x1f{MARK}]+')
# SCALAR: the characters of a number, true, false or null. JSON_SCALAR: these values in JSON's syntax.
SCALAR = re.compile(r"[-+.\w]*")
JSON_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# A key without quotes.
BARE_KEY = re.compile(r"""[^\s:{}\[\],"']*""")
SPACE = re.compile(r"\s*")
# The characters that may follow a backslash in a JSON string.
ESCAPED = frozenset('"\\/bfnrtu')

# If a call in JSON has these keys, they and their values are ignored.
IGNORED = ("id", "type", "tool_call_id")

# The deepest nesting of values; deeper values raise MalformedError.
MAX_DEPTH = 64


class MalformedError(Exception):
    """The text is not a call, or its arguments are not in the format."""


class Cursor:
    """A position in a text that grows.

    Attributes:
        text: the text that is still needed, with a MARK before each control token.
        at: the index of the next character in `text`.
        is_end: whether the text is complete.
        is_cut: whether the token limit or the timeout ended the answer.
        is_kept: whether the text that has been read is kept, so that indices stay valid.
    """

    def __init__(self) -> None:
        self.text, self.at, self.is_end, self.is_cut, self.is_kept = "", 0, False, False, False

    def more(self) -> Reading:
        """Wait for more text; first drop the text before the cursor, unless `is_kept`."""
        if not self.is_kept:
            self.text, self.at = self.text[self.at :], 0
        yield

    def next(self, n: int = 1) -> Generator[None, None, str]:
        """Return the next n characters, or fewer at the end of the text; the cursor does not move."""
        while self.at + n > len(self.text) and not self.is_end:
            yield from self.more()
        return self.text[self.at : self.at + n]

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Return the text that a pattern matches at this position; the cursor does not move."""
        while True:
            match = pattern.match(self.text, self.at)
            end = self.at if match is None else match.end()
            if end < len(self.text) or self.is_end:
                return self.text[self.at : end]
            yield from self.more()

    def spaces(self) -> Generator[None, None, str]:
        """Move over white space and return it."""
        found = yield from self.run(SPACE)
        self.at += len(found)
        return found

    def here(self, delimiter: Delimiter) -> Generator[None, None, re.Match[str] | None]:
        """Return the match of a delimiter at this position; the cursor does not move."""
        while True:
            match = delimiter.match(self.text, self.at, is_end=self.is_end)
            if not isinstance(match, _More):
                return match
            yield from self.more()

    def find(self, delimiters: Sequence[Delimiter], give: Emit) -> Generator[None, None, re.Match[str] | None]:
        """Emit the text before the first of several delimiters, move to this delimiter, and return its match.

        If no delimiter follows, emit the rest of the text and return None.
        """
        while True:
            found, certain = None, len(self.text)
            for delimiter in delimiters:
                match, until = delimiter.find(self.text, self.at, is_end=self.is_end)
                if until < certain or (until == certain and match is None):
                    found, certain = match, until
            if certain > self.at:
                give(self.text[self.at : certain])
                self.at = certain
            if found is not None or self.is_end:
                return found
            yield from self.more()


class CallReader:
    """Parses the calls at the position of a cursor, and appends their events to the list `events`.

    Attributes:
        tools: the tools by name.
        n_calls: the number of calls that have begun.
        n_ended: the number of calls whose arguments are complete.
    """

    def __init__(
        self,
        cursor: Cursor,
        about: AnswerFormat,
        form: CallForm | None,
        tools: Sequence[Mapping[str, Any]],
        events: list[Event],
    ) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.n_calls = self.n_ended = 0
        self._cursor, self._format, self._events = cursor, about, events
        if form is not None:
            self._form = form
        self._is_open = False

    def read(self, name: str | None, *, has_opening: bool, before: Callable[[], None]) -> Generator[None, None, bool]:
        """Parse calls and their closing delimiter. If there are no calls, return False and do not move the cursor.

        Args:
            name: the name of the tool, if the opening delimiter contains it.
            has_opening: whether an opening delimiter stands before the cursor; False only with `CallForm.is_bare`.
            before: a function that is called before each `CallBegin`.
        """
        cursor, n = self._cursor, self.n_calls
        self._before, self._has_opening, self._is_open = before, has_opening, False
        cursor.is_kept, at = True, cursor.at
        try:
            yield from self._content(name)
        except MalformedError:
            if self.n_calls == n:
                cursor.at, cursor.is_kept = at, False
                return False
            if self._is_open:
                yield from self._rest()
        if self._form.close:
            cursor.is_kept, at = True, cursor.at
            yield from cursor.spaces()
            match = yield from cursor.here(self._form.close)
            cursor.at, cursor.is_kept = match.end() if match else at, False
        return True

    def _content(self, name: str | None) -> Reading:
        form = self._form
        if form.content == "xml-inline":
            yield from self._tags(name)
        elif form.content == "json" and form.is_list:
            yield from self._list()
        elif form.content == "json" and form.arguments_key:
            yield from self._object(name)
        elif form.content == "json":
            yield from self._arguments(name)
        else:
            yield from self._block(name)

    def _begin(self, name: str | None) -> None:
        if not name:
            raise MalformedError
        self._before()
        self._cursor.is_kept = False  # from here on, the cursor does not go back
        self._events.append(CallBegin(self.n_calls, self._format.new_id(), name))
        self.n_calls, self._is_open = self.n_calls + 1, True

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self.n_calls - 1, text.replace(MARK, "")))

    def _end(self) -> None:
        self._events.append(CallEnd(self.n_calls - 1))
        self.n_ended, self._is_open = self.n_ended + 1, False

    def _emit_call(self, name: str | None, arguments: str) -> None:
        self._begin(name)
        self._emit_arguments(arguments)
        self._end()

    def _rest(self) -> Reading:
        """Emit the rest of malformed arguments unchanged, up to the end of the call."""
        ends = [each for each in (self._form.close or self._form.open,) if each]
        match = yield from self._cursor.find(ends, self._emit_arguments)
        if match is not None:
            self._end()
        self._is_open = False

    # Calls as JSON.

    def _list(self) -> Reading:
        yield from self._take("[")
        while True:
            yield from self._object(None)
            if (yield from self._char()) != ",":
                break
            self._cursor.at += 1
        yield from self._take("]")

    def _object(self, name: str | None) -> Reading:
        """Parse an object with the name and the arguments of a call.

        Its other members, except those in IGNORED, become text after the call. In a call without an opening delimiter,
        they raise MalformedError.
        """
        form, held, others, n = self._form, "", list[str](), self.n_calls
        yield from self._take("{")
        while (yield from self._char()) != "}":
            member = yield from self._collected(self._member)
            key = json.loads(member[:-1])
            yield from self._cursor.spaces()
            is_arguments = key in (form.arguments_key, "arguments", "parameters")
            if key == form.name_key and name is None:
                name = json.loads((yield from self._collected(self._string)))
            elif is_arguments and name is not None and self.n_calls == n and not held:
                yield from self._arguments(name)
            elif is_arguments and self.n_calls == n and not held:
                held = yield from self._collected(self._value)
            elif self._has_opening or key in IGNORED:
                value = yield from self._collected(self._value)
                others += [] if key in IGNORED else [f"{member} {value}"]
            else:
                raise MalformedError
            if (yield from self._char()) == ",":
                self._cursor.at += 1
            elif (yield from self._char()) != "}":
                raise MalformedError
        self._cursor.at += 1
        if self.n_calls == n:
            if not held and not self._has_opening:
                raise MalformedError
            self._emit_call(name, _object_text(held or "{}"))
        self._events += [TextDelta(", ".join(others))] if others else []

    def _arguments(self, name: str | None) -> Reading:
        """Parse the arguments of a call, and emit the call.

        Arguments are an object, which is emitted piece by piece; a string with an object's JSON text; or null.
        """
        char = yield from self._char()
        if char == "{":
            self._begin(name)
            yield from self._value(self._emit_arguments)
            self._end()
        elif char in ('"', "n"):
            text = yield from self._collected(self._string if char == '"' else self._value)
            self._emit_call(name, _object_text(text))
        else:
            raise MalformedError

    def _value(self, emit: Emit) -> Reading:
        """Parse a value in the syntax of the format, and emit it as JSON."""
        cursor, closing = self._cursor, list[str]()
        while True:
            char = yield from self._char(emit)
            if char and char in "{[":
                if len(closing) == MAX_DEPTH:
                    raise MalformedError
                emit(char)
                cursor.at += 1
                closing.append("}" if char == "{" else "]")
                if (yield from self._char(emit)) != closing[-1]:
                    if char == "{":
                        yield from self._member(emit)
                    continue
            else:
                yield from self._scalar(emit)
            while closing:
                char = yield from self._char(emit)
                if char != closing[-1] and char != ",":
                    raise MalformedError
                emit(char)
                cursor.at += 1
                if char == ",":
                    if closing[-1] == "}":
                        yield from self._member(emit)
                    break
                closing.pop()
            else:
                return

    def _member(self, emit: Emit) -> Reading:
        """Emit a key and the colon after it."""
        yield from self._key(emit)
        yield from self._char(emit)
        yield from self._take(":")
        emit(":")

    def _key(self, emit: Emit) -> Reading:
        char = yield from self._char(emit)
        if char == '"' or not self._form.settings.get("unquoted_keys"):
            yield from self._string(emit)
        else:
            key = yield from self._cursor.run(BARE_KEY)
            if not key:
                raise MalformedError
            self._cursor.at += len(key)
            emit(json.dumps(key, ensure_ascii=False))

    def _scalar(self, emit: Emit) -> Reading:
        """Emit a string, a number, true, false or null."""
        if (yield from self._cursor.next()) == '"':
            yield from self._string(emit)
            return
        for opening, closing in self._form.quotes:
            match = yield from self._cursor.here(opening)
            if match:
                self._cursor.at = match.end()
                emit('"')
                match = yield from self._cursor.find([closing], lambda text: emit(_escaped(text)))
                if match is None:
                    raise MalformedError
                self._cursor.at = match.end()
                emit('"')
                return
        text = yield from self._cursor.run(SCALAR)
        if JSON_SCALAR.fullmatch(text) is None:
            raise MalformedError
        self._cursor.at += len(text)
        emit(text)

    def _string(self, emit: Emit) -> Reading:
        """Emit a JSON string. Characters and escapes that JSON does not allow are replaced by valid ones."""
        cursor = self._cursor
        if (yield from cursor.next()) != '"':
            raise MalformedError
        emit('"')
        cursor.at += 1
        while True:
            match = PLAIN.match(cursor.text, cursor.at)
            if match:
                emit(match[0])
                cursor.at = match.end()
            char = yield from cursor.next()
            if char == "\\":
                pair = yield from cursor.next(2)
                if len(pair) < 2:
                    raise MalformedError
                emit(pair if pair[1] in ESCAPED else "'" if pair[1] == "'" else "\\\\" + _escaped(pair[1]))
                cursor.at += 2
            elif char == MARK and self._form.close and (yield from cursor.here(self._form.close)):
                raise MalformedError
            elif char == '"':
                emit('"')
                cursor.at += 1
                return
            elif char:
                emit("" if char == MARK else _escaped(char))
                cursor.at += 1
            else:
                raise MalformedError

    def _collected(self, read: Callable[[Emit], Reading]) -> Generator[None, None, str]:
        """Return the text that `read` emits, without white space around it."""
        parts: list[str] = []
        yield from read(parts.append)
        return "".join(parts).strip()

    def _char(self, emit: Emit | None = None) -> Generator[None, None, str]:
        """Move over white space, pass it to `emit` unless `emit` is None, and return the next character."""
        spaces = yield from self._cursor.spaces()
        if emit is not None and spaces:
            emit(spaces)
        return (yield from self._cursor.next())

    def _take(self, char: str) -> Reading:
        if (yield from self._char()) != char:
            raise MalformedError
        self._cursor.at += 1

    # Calls as tags, lines or Python.

    def _tags(self, name: str | None) -> Reading:
        assert self._form.tag is not None  # noqa: S101 - for mypy
        cursor, n, (opening, closing) = self._cursor, 0, self._form.tag
        types = types_of(self.tools.get(name or "", {}))
        while True:
            yield from cursor.spaces()
            match = yield from cursor.here(opening)
            if match is None:
                break
            cursor.at = match.end()
            if not n:
                self._begin(name)
            key = match["key"].replace(MARK, "")
            self._emit_arguments(("{" if not n else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            value = _Value(self._emit_arguments, types.get(key))
            yield from self._tagged(value, opening, closing)
            n += 1
        closes = self._form.close is not None and (yield from cursor.here(self._form.close))
        if not n:
            if not closes:
                raise MalformedError
            self._begin(name)
        if closes or not cursor.is_cut or (yield from cursor.next()):
            self._emit_arguments("}" if n else "{}")
            self._end()

    def _tagged(self, value: _Value, opening: Delimiter, closing: Delimiter) -> Reading:
        """Emit a value between tags: piece by piece if it must be a string, else when it is complete."""
        cursor = self._cursor
        while True:
            match = yield from cursor.find([closing], value.add)
            if match is None:
                value.stop()
                raise MalformedError
            at, end, cursor.is_kept = cursor.at, match.end(), True
            cursor.at = end
            is_end = yield from self._is_after_value(opening)
            cursor.at, cursor.is_kept = at, False
            if is_end:
                cursor.at = end
                value.end()
                return
            # Neither another value nor the end of the call follows this closing tag, so the tag is part of the value.
            value.add(cursor.text[at])
            cursor.at += 1

    def _is_after_value(self, opening: Delimiter) -> Generator[None, None, bool]:
        """Return whether another value, the end of the call or the end of the answer follows."""
        cursor = self._cursor
        yield from cursor.spaces()
        if not (yield from cursor.next()):
            return True
        for delimiter in (opening, self._form.close):
            if delimiter and (yield from cursor.here(delimiter)):
                return True
        return False

    def _block(self, name: str | None) -> Reading:
        parts: list[str] = []
        yield from self._cursor.find([self._form.close] if self._form.close else [], parts.append)
        text = "".join(parts).replace(MARK, "")
        found: Sequence[tuple[str | None, str]]
        if self._form.content == "kv-lines":
            found = [(name, _lines(text, self._form.settings, types_of(self.tools.get(name or "", {}))))]
        else:
            found = _python_calls(text, self.tools)
        for each, arguments in found:
            self._emit_call(each, arguments)


class _Value:
    """Collects the text of an argument's value, which is written without quotes, and emits it as JSON."""

    def __init__(self, emit: Emit, types: Types | None) -> None:
        self._emit, self._types, self._held, self._is_string = emit, types, "", False

    def add(self, text: str) -> None:
        self._held += text.replace(MARK, "")
        if not self._is_string and self._types is not None and self._types <= STRINGS:
            may_be_null = "null" in self._types and "null".startswith(self._held)
            if not may_be_null:
                self._is_string = True
                self._emit('"')
        if self._is_string:
            self._emit(_escaped(self._held))
            self._held = ""

    def end(self) -> None:
        """Emit the closing quote if a string has begun, else the whole value."""
        self._emit('"' if self._is_string else json_of(self._held, self._types))

    def stop(self) -> None:
        """End a value that is cut off: emit text that was held back, as a JSON string without its closing quote."""
        if not self._is_string and self._held:
            self._emit('"' + _escaped(self._held))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _object_text(text: str) -> str:
    """Return the JSON text of an object. `text` is the object, a JSON string that contains it, or null.

    Return "{}" for null and for an empty string.
    """
    try:
        value = json.loads(text)
        text, value = (value, json.loads(value or "{}")) if isinstance(value, str) else (text, value)
    except ValueError:
        raise MalformedError from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise MalformedError
    return text or "{}"


def _lines(text: str, settings: Mapping[str, Any], types: Mapping[str, Types]) -> str:
    """Return the JSON text of arguments that are written as lines, each with a key and a value."""
    pairs = [line.partition(settings.get("kv_sep", ":")) for line in text.split(settings.get("line_sep", "\n"))]
    if any(key.strip() and not separator for key, separator, _ in pairs):
        raise MalformedError
    members = [
        f"{json.dumps(key.strip(), ensure_ascii=False)}: {json_of(value.strip(), types.get(key.strip()))}"
        for key, separator, value in pairs
        if separator
    ]
    return "{" + ", ".join(members) + "}"


def _python_calls(text: str, tools: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and arguments of a list of calls in Python's syntax."""
    # If the text does not parse, escape line feeds, because a model may write them inside of string literals.
    for source in (text.strip(), text.strip().replace("\n", "\\n")):
        try:
            if any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline)):
                continue
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
            return [_python_call(call, tools) for call in calls]
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
            continue
    raise MalformedError


def _python_call(call: ast.expr, tools: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the JSON text of the arguments of a call.

    Raise ValueError or TypeError if the expression is not a call, if an argument is not a literal that JSON can express
    or is given twice, or if there are more positional arguments than the tool has parameters.
    """
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call with literal arguments")
    name = ast.unparse(call.func)
    names = tools.get(name, {}).get("parameters", {}).get("properties", {})
    arguments = dict(zip(names, map(_python_value, call.args), strict=False))
    if len(arguments) < len(call.args):
        raise ValueError("more arguments than parameters")
    for keyword in call.keywords:
        if keyword.arg in arguments:
            raise ValueError("an argument twice")
        arguments[str(keyword.arg)] = _python_value(keyword.value)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _python_value(value: ast.expr) -> Any:
    """Return the value of a Python literal, which may contain JSON's true, false and null."""
    if isinstance(value, ast.Name) and value.id in ("true", "false", "null"):
        return json.loads(value.id)
    if isinstance(value, ast.List | ast.Tuple):
        return [_python_value(item) for item in value.elts]
    if isinstance(value, ast.Dict) and None not in value.keys:
        return {
            _python_value(key): _python_value(item)
            for key, item in zip(value.keys, value.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(value)
