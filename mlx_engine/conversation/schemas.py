"""The arguments of a tool call: parse them, and find their types in the tool's JSON Schema.

Some models write arguments without quotes. The types in the schema then decide between a string and another JSON value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from mlx_engine.constraint import target

Types: TypeAlias = "frozenset[str]"

# If a schema allows only these types, the value is text, or null.
STRINGS = frozenset({"string", "null"})

# Names of types that clients send, although JSON Schema does not have them.
SYNONYMS = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "list": "array",
}  # fmt: skip

PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

# The deepest nesting of references and alternatives that is followed.
MAX_DEPTH = 16


def arguments_of(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a call, which are an object or the JSON text of one; None if they are neither."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
    return dict(found) if isinstance(found, Mapping) else None


def types_of(tool: Mapping[str, Any]) -> dict[str, Types]:
    """Return the types that each argument of a tool may have; arguments that may have any type are left out."""
    schema = tool.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    found = {name: types_in(each, schema) for name, each in properties.items()}
    return {name: types for name, types in found.items() if types}


def types_in(schema: Any, root: Any, depth: int = 0) -> Types:
    """Return the JSON types that a schema allows; an empty set if the schema does not restrict the type."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_in(target(reference, root), root, depth + 1)
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    found = {SYNONYMS.get(name, name) for name in found if isinstance(name, str)}
    if not found:
        values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
        found = {_type(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or () if not found else ():
            found |= types_in(each, root, depth + 1)
    return frozenset(found | ({"null"} if found and schema.get("nullable") is True else set()))


def json_of(text: str, types: Types | None) -> str:
    """Convert a value that the model has written without quotes to JSON text.

    If the text is JSON of an allowed type other than string, return this JSON. Python's True, False and None count as
    JSON. Numbers such as 007 count, too, if `types` has "integer" or "number". Any other text becomes a JSON string,
    which includes quotes that the model has written. If `types` is None, any type is allowed.
    """
    plain = PYTHON_NAMES.get(text.strip(), text.strip())
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value, plain = _number(text.strip(), types or frozenset())
    kind = _type(value)
    allowed = types if types is not None else frozenset({"integer", "number", "boolean", "object", "array", "null"})
    is_whole = kind == "number" and "integer" in allowed and float(value).is_integer()
    if kind in allowed - {"string"} or (kind == "integer" and "number" in allowed) or is_whole:
        return plain
    return json.dumps(text, ensure_ascii=False)


def _number(text: str, types: Types) -> tuple[Any, str]:
    """Return a number that is not written as in JSON, such as 007 or .5, and its JSON text; otherwise `text` twice."""
    kinds = [kind for name, kind in (("integer", int), ("number", float)) if name in types]
    for kind in kinds:
        try:
            value = kind(text)
            return value, json.dumps(value, allow_nan=False)
        except ValueError:
            continue
    return text, text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")
