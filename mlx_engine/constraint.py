"""A constraint on the text of an answer: a JSON Schema, a regular expression, a grammar or a choice.

While an answer is generated, `loop/constraint.py` turns the `Constraint` into masks of the tokens that may come next,
with the library llguidance. This module imports no third-party library, so that options can be declared and checked
quickly. If a JSON Schema has a keyword that the masks would ignore, no constraint is made: OptionError is raised.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mlx_engine.errors import OptionError, shown

Kind = Literal["json_schema", "regex", "grammar", "choice"]

# Keywords of JSON Schema. The values of the first group are schemas, of the second maps from names to schemas, and of
# the third lists of schemas. `items` may have a schema or a list.
SCHEMAS = ("additionalProperties", "additionalItems", "items")
SCHEMA_MAPS = ("properties", "patternProperties")
SCHEMA_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")

UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
        "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "nullable", "x-guidance",
    }
)  # fmt: skip
"""Keywords of schemas that the masks cannot enforce; also llguidance's own `x-guidance`, which `bounded` adds later."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""The values of `format` that the masks enforce."""

_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_SHORT = "[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"

# Maps some of `FORMATS` to patterns, which are added to a schema because llguidance's own check of these formats
# accepts 29 February of every year, and second 60.
STRICTER = {
    "date": f"^({_SHORT}|{_LEAP})$",
    "time": f"^{_TIME}[^0-9]",
    "date-time": f"^({_SHORT}|{_LEAP})[tT]{_TIME}[^0-9]",
}

# Keywords whose values are whole numbers. JSON may write them as floats, such as 3.0.
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

# Allow at most one space after a comma or colon, and no line feed. With free white space, a small model may write white
# space until the token limit.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

EMBEDDED = re.compile(r"%json\s*(?=\{)")


@dataclass(frozen=True)
class Constraint:
    """The texts that an answer may have. Make one with `json_schema`, `json_object`, `regex`, `grammar` or `choice`.

    Attributes:
        text: as `kind` says, a JSON Schema, a regular expression, a Lark grammar, or ("choice") a JSON list of texts.
        follows_reasoning: whether the answer may begin with reasoning, to which the constraint does not apply. The
            engine sets it to True if the prompt consists of messages.
    """

    kind: Kind
    text: str
    follows_reasoning: bool = False

    def __post_init__(self) -> None:
        """Raise OptionError if the constraint is invalid, as far as this can be checked without a tokenizer."""
        if self.kind == "json_schema":
            check_schema(_parsed(self.text))
        elif self.kind == "choice":
            _check_choice(json.loads(self.text))
        elif self.kind not in ("regex", "grammar"):
            raise _wrong("a JSON Schema, a regular expression, a grammar or a choice", self.kind)
        if not self.text:
            raise _wrong(f"a {self.kind} that is not empty", self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """Allow the JSON values that a schema describes, on one line, with properties in the schema's order.

        `schema` is a JSON Schema (draft 2020-12 or older), or its JSON text. Raise OptionError if it is not valid.
        """
        parsed = _parsed(schema) if isinstance(schema, str) else schema
        check_schema(parsed)
        return cls("json_schema", _text(parsed))

    @classmethod
    def json_object(cls) -> Constraint:
        """Allow any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, text: str) -> Constraint:
        """Allow the texts that a regular expression matches as a whole, in the syntax of Rust's regex crate.

        The syntax has no look-around and no back-references.
        """
        return cls("regex", _checked_text(text, "a regular expression"))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Allow the texts of a grammar in llguidance's variant of Lark, whose start rule is named `start`.

        `<name>` is the special token of that name in the vocabulary. `%json {...}` stands for the values of a JSON
        Schema, with at most one space after a comma or colon. The schema is checked as in `json_schema`, unless it has
        the keyword "x-guidance": then it is passed to llguidance unchanged.
        """
        return cls("grammar", _with_bounded_json(_checked_text(lark, "a grammar")))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Allow one of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise _wrong("a list of texts", texts)
        _check_choice(list(texts))
        return cls("choice", _text(list(texts)))

    def after_reasoning(self) -> Constraint:
        """Return the same constraint for an answer that may begin with reasoning."""
        return replace(self, follows_reasoning=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of the constraint, in hex. The server's replies contain it."""
        parts = json.dumps([self.kind, self.text, self.follows_reasoning])
        return hashlib.sha256(parts.encode()).hexdigest()


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance: with `WHITESPACE`, and with the patterns of `STRICTER` for formats.

    Counts such as 3.0 become integers. Keywords that change nothing are removed, because llguidance would refuse them.
    """
    copied: dict[str, Any] = json.loads(_text(schema))
    for part in list(_parts(copied)):
        for name, value in list(part.schema.items()):
            if _is_noop(name, value):
                del part.schema[name]
            elif name in COUNTS and isinstance(value, float) and value.is_integer():
                part.schema[name] = int(value)
        pattern = STRICTER.get(str(part.schema.get("format")))
        if pattern is not None:
            part.schema["allOf"] = [*part.schema.get("allOf", []), {"pattern": pattern}]
    return {**copied, "x-guidance": WHITESPACE}


def check_schema(schema: object) -> None:
    """Raise OptionError if a schema is not a mapping, or has a keyword, format or reference that is not supported.

    The message has the path of the keyword, such as "$.properties.name.format".
    """
    for part in _parts(schema):
        for name in part.schema:
            why = _why_not(name, part.schema[name], part.root)
            if why is not None:
                raise _unsupported(f"{part.path}.{name}", why)


def without_unsupported(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a schema without the keywords that the masks cannot enforce, and the paths of these keywords."""
    copied: dict[str, Any] = json.loads(_text(schema))
    left_out = []
    for part in _parts(copied):
        for name in [name for name, value in part.schema.items() if _why_not(name, value, part.root) is not None]:
            del part.schema[name]
            left_out.append(f"{part.path}.{name}")
    return copied, left_out


class _Part(NamedTuple):
    """A schema inside a root schema, or the root itself, with its path in the root."""

    path: str
    schema: Any
    root: Any


def _parts(root: object) -> Iterator[_Part]:
    """Yield a schema, then every schema inside it and every schema to which a `$ref` refers, each once.

    Raise OptionError if the root is not a mapping, or if an inner schema is neither a mapping nor a boolean.
    """
    if not isinstance(root, Mapping):
        raise _wrong("a JSON Schema, which is an object", root)
    found, seen = [_Part("$", root, root)], {id(root)}
    while found:
        part = found.pop()
        yield part
        for path, inner in _inner(part):
            if isinstance(inner, Mapping) and id(inner) not in seen:
                seen.add(id(inner))
                found.append(_Part(path, inner, root))
            elif not isinstance(inner, Mapping | bool):
                raise _unsupported(path, f"expected a schema, found {shown(inner)}")


def _inner(part: _Part) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, and the target of its `$ref`, with their paths."""
    path, schema = part.path, part.schema
    for name in SCHEMAS:
        if name in schema and not isinstance(schema[name], list):
            yield f"{path}.{name}", schema[name]
    for name in SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{path}.{name}[{i}]", one) for i, one in enumerate(schema[name]))
    for name in SCHEMA_MAPS:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{path}.{name}.{key}", one) for key, one in schema[name].items())
    reference = schema.get("$ref")
    if reference is not None and _why_not("$ref", reference, part.root) is None:
        yield reference.replace("/", ".").replace("#", "$"), target(reference, part.root)


def _why_not(name: object, value: Any, root: Any) -> str | None:
    """Return the reason why a keyword with this value is not supported; None if it is supported."""
    if not isinstance(name, str):
        return "the keyword is not a string"
    if name in UNSUPPORTED and not _is_noop(name, value):
        return "the keyword is not supported; leave it out, and check the answer yourself"
    if name == "format" and value not in FORMATS:
        return f"{shown(value)} is not supported; use one of {', '.join(FORMATS)}"
    if name != "$ref":
        return None
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
        return f"{shown(value)} is no path in this schema; copy its target into $defs, and write #/$defs/NAME"
    return None if target(value, root) is not None else f"{value!r} names nothing in this schema"


def target(reference: str, root: Any) -> Any:
    """Return the part of a schema to which a reference such as "#/$defs/name" leads; None if there is no such part."""
    from urllib.parse import unquote

    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return found


def _is_noop(name: str, value: object) -> bool:
    """Return whether a keyword of `UNSUPPORTED` changes nothing, because its value False is its default."""
    return name in ("uniqueItems", "nullable", "$recursiveAnchor") and value is False


def _with_bounded_json(lark: str) -> str:
    """Return a grammar with each `%json` schema checked and `bounded`; those with "x-guidance" stay unchanged."""
    made, at = "", 0
    while match := EMBEDDED.search(lark, at):
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except json.JSONDecodeError as error:
            raise _wrong("a grammar with JSON after each %json", f"{lark[match.end() :]:.40}... ({error})") from None
        if "x-guidance" not in schema:
            check_schema(schema)
            schema = bounded(schema)
        made += lark[at : match.end()] + _text(schema)
        at = end
    return made + lark[at:]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"a JSON Schema in valid JSON ({error})", text) from None


def _text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"made of JSON values ({error})", value) from None


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _wrong(f"{what}: a text that is not empty, in valid Unicode", text)
    return text


def _check_choice(texts: object) -> None:
    if not isinstance(texts, list) or not texts:
        raise _wrong("a choice of at least one text", texts)
    for text in texts:
        _checked_text(text, "a choice of texts")


def _unsupported(path: str, why: str) -> OptionError:
    return OptionError(f"constraint: {path}: {why}", option="constraint", expected="a supported schema", found=path)


def _wrong(rule: str, found: object) -> OptionError:
    return OptionError(
        f"constraint must be {rule}, not {shown(found)}", option="constraint", expected=rule, found=found
    )
