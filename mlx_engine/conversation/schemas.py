"""The arguments of a tool call: parse them, and find their types in the tool's JSON Schema.

Some models write arguments without quotes. The types in the schema then decide whether 7 is a string or a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from mlx_engine.constraint import target

Types: TypeAlias = "frozenset[str]"

# If a schema allows only these types, a value without quotes is a string or null, even if it looks like a number.
STRINGS = frozenset({"string", "null"})

# Maps names of types that clients send, but JSON Schema does not have, to names of JSON Schema.
SYNONYMS = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "list": "array",
}  # fmt: skip

PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

# References and alternatives are followed down to this depth.
MAX_DEPTH = 16


def arguments_of(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a call; `given` is an object or its JSON text. For any other value, return None."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
    return dict(found) if isinstance(found, Mapping) else None


def types_of(tool: Mapping[str, Any]) -> dict[str, Types]:
    """Map the name of each argument of a tool to its allowed types. Leave out arguments that may have any type."""
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
    """Return the JSON text of a value that the model has written without quotes.

    If the text is JSON of an allowed type other than string, the result is this JSON. Python's True, False and None
    count as JSON. Numbers such as 007 count, too, if `types` has "integer" or "number". Any other text becomes a JSON
    string. If the text has quotes, they are part of the string. If `types` is None, any type is allowed.
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
    """Parse a number that is not in JSON's syntax, such as 007 or .5. Return the number and its JSON text.

    If the text is not a number of an allowed type, return (text, text).
    """
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
