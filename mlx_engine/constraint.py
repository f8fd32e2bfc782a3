"""A constraint on the text of an answer: a JSON Schema, a regular expression, a grammar or a choice.

`Constraint` says which texts are allowed. `loop/constraint.py` turns it into masks of tokens. This module imports no
library, so that options can be declared and checked without one.

A schema is checked when its constraint is made: a keyword that would be ignored is refused by its name and its path in
the schema.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_engine.errors import OptionError, shown

Kind = Literal["json_schema", "regex", "grammar", "choice"]

# Keywords of JSON Schema whose values are schemas, maps of schemas or lists of schemas.
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
"""Keywords of JSON Schema, of OpenAPI and of llguidance that change what is valid, and that no mask implements."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""The values of `format` that masks implement."""

# At most one space, and no line feed: a small model may otherwise write white space until the token limit.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

EMBEDDED = re.compile(r"%json\s*(?=\{)")


@dataclass(frozen=True)
class Constraint:
    """The texts that an answer may have. Make one with `json_schema`, `json_object`, `regex`, `grammar` or `choice`.

    Attributes:
        kind: how `text` is written.
        text: a JSON Schema, a regular expression, a Lark grammar, or a JSON list of texts.
        follows_reasoning: the answer may begin with reasoning, which is free; the constraint holds after it. Prompts
            that are messages set this.
    """

    kind: Kind
    text: str
    follows_reasoning: bool = False

    def __post_init__(self) -> None:
        """Check the text, as far as this is possible without a tokenizer; raise OptionError if it is invalid."""
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

        Args:
            schema: a JSON Schema (draft 2020-12 or older), as a mapping or as JSON text.

        Raises:
            OptionError: the schema is invalid, or has a keyword that is not supported; the message has its path.
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

        Look-around and back-references do not exist there.
        """
        return cls("regex", _checked_text(text, "a regular expression"))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Allow the texts of a grammar in llguidance's variant of Lark, whose first rule is `start`.

        `<name>` is the special token of that name in the vocabulary, and `%json {...}` a JSON Schema: it is checked as
        in `json_schema`, and its white space is bounded.

        Raises:
            OptionError: a schema in the grammar is invalid.
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
        """The SHA-256 of the constraint, in hex: the name of the constraint in receipts."""
        parts = json.dumps([self.kind, self.text, self.follows_reasoning])
        return hashlib.sha256(parts.encode()).hexdigest()


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance, with white space bounded and without keywords that change nothing."""
    cleaned: dict[str, Any] = _without_noops(schema)
    return {**cleaned, "x-guidance": WHITESPACE}


def check_schema(schema: object) -> None:
    """Check that masks implement every keyword that a schema uses.

    Raises:
        OptionError: the schema is no mapping, or has a keyword, a format or a reference that is not supported; the
            message has the path, such as "$.properties.name.format".
    """
    if not isinstance(schema, Mapping):
        raise _wrong("a JSON Schema, which is an object", schema)
    found, seen = [("$", schema)], {id(schema)}
    while found:
        path, part = found.pop()
        _check_keywords(path, part)
        for at, inner in _inner(path, part, schema):
            if isinstance(inner, Mapping) and id(inner) not in seen:
                seen.add(id(inner))
                found.append((at, inner))
            elif not isinstance(inner, Mapping | bool):
                raise _unsupported(at, f"expected a schema, found {shown(inner)}")


def _check_keywords(path: str, schema: Mapping[str, Any]) -> None:
    """Check the keywords of one schema, without those inside."""
    for name, value in schema.items():
        if not isinstance(name, str):
            raise _unsupported(path, f"expected keywords that are texts, found {shown(name)}")
        if name in UNSUPPORTED and not _is_noop(name, value):
            raise _unsupported(f"{path}.{name}", "the keyword is not supported; leave it out, and check the answer")
    form = schema.get("format")
    if form is not None and form not in FORMATS:
        raise _unsupported(f"{path}.format", f"{shown(form)} is not supported; use one of {', '.join(FORMATS)}")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        why = f"{shown(reference)} is outside of this schema; copy what it names into $defs, and write #/$defs/NAME"
        raise _unsupported(f"{path}.$ref", why)


def _inner(path: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, with their paths; also those that it refers to."""
    for name in SCHEMAS:
        if name in schema and not isinstance(schema[name], list):
            yield f"{path}.{name}", schema[name]
    for name in SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{path}.{name}[{i}]", part) for i, part in enumerate(schema[name]))
    for name in SCHEMA_MAPS:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{path}.{name}.{key}", part) for key, part in schema[name].items())
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield reference, _target(f"{path}.$ref", reference, root)


def _target(path: str, reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference such as "#/$defs/name" names."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise _unsupported(path, f"{shown(reference)} names nothing in this schema") from None
    if reference != "#" and not reference.startswith("#/"):
        raise _unsupported(path, f"{shown(reference)} is an anchor; write a path, such as #/$defs/NAME")
    return found


def _is_noop(name: str, value: object) -> bool:
    """Return whether a keyword that is not supported has a value that changes nothing."""
    return name in ("uniqueItems", "nullable", "$recursiveAnchor") and value is False


def _without_noops(part: Any) -> Any:
    """Return a schema without keywords that change nothing, which llguidance refuses."""
    if isinstance(part, list):
        return [_without_noops(one) for one in part]
    if not isinstance(part, Mapping):
        return part
    return {name: _without_noops(value) for name, value in part.items() if not _is_noop(name, value)}


def _with_bounded_json(lark: str) -> str:
    """Return a grammar whose `%json` schemas are checked, and have their white space bounded."""
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
        raise _wrong(f"a JSON Schema, but is no JSON ({error})", text) from None


def _text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"values that JSON has ({error})", value) from None


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _wrong(f"{what}: a text that is not empty, in valid Unicode", text)
    return text


def _check_choice(texts: object) -> None:
    """Check the texts of a choice."""
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
