"""Python functions as tools: describe a function by its signature and docstring, and call it with checked arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, get_type_hints

from mlx_engine.conversation.schemas import arguments_of
from mlx_engine.errors import OptionError, shown

Function: TypeAlias = Callable[..., Any]
Tool: TypeAlias = "Function | Mapping[str, Any]"

KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# ARGUMENTS matches the section of a docstring that describes parameters, and ARGUMENT one parameter in this section.
# SECTION matches the heading of a section.
ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?: *\([^)]*\))?: *(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)


class ToolCall(NamedTuple):
    """A call of a tool in an answer.

    Attributes:
        id: the id of the call, which is the `tool_call_id` of the message with the result.
        arguments: maps the names of arguments to values; None if `text` is no JSON object.
        text: the JSON text of the arguments; incomplete if the answer was cut off.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    text: str

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> ToolCall:
        """Convert a call from its form in a message of OpenAI's API."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        return cls(call["id"], name, arguments_of(text), text)


def tools_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return a description of each tool, in the form of OpenAI's API.

    A tool is a function, which `function_tool` describes, or a description, to which missing fields are added.

    Raises:
        OptionError: a tool is neither a valid description nor a function that `function_tool` can describe, or two
            tools have the same name.
    """
    found = [function_tool(tool) if callable(tool) else _checked(tool, i) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"tools: two have the name {twice!r}; rename one", option="tools", found=twice)
    return found


def _checked(tool: Any, i: int) -> dict[str, Any]:
    """Check a description of a tool, and add missing fields, including the outer object with the key `function`."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        expected = 'a function, or {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise OptionError(f"tools[{i}] must be {expected}, not {shown(tool)}", option="tools", found=tool)
    if schema is not None and not isinstance(schema, Mapping):
        message = f"tools[{i}].function.parameters must be a JSON Schema, not {shown(schema)}"
        raise OptionError(message, option="tools", found=schema)
    about = {"description": "", **function, "parameters": schema or {"type": "object", "properties": {}}}
    return {"type": "function", "function": about}


def function_tool(function: Function) -> dict[str, Any]:
    """Return the description of a function as a tool: its name, docstring text, and a JSON Schema of its parameters.

    Types come from the annotations, and the descriptions of parameters from the docstring's section `Args`. A parameter
    without an annotation may have any value. A parameter with a default may be left out.

    Raises:
        OptionError: the function has no name, a parameter cannot be given by name, or JSON cannot represent its type.
    """
    import msgspec

    made = _struct(function)
    text = inspect.cleandoc(function.__doc__ or "")
    section = SECTION.search(text)
    _, components = msgspec.json.schema_components([made])
    definitions = dict(components)
    schema: dict[str, Any] = definitions.pop(_name(function))
    described = ARGUMENTS.search(text)
    about = inspect.cleandoc("\n" + described[1]) if described else ""
    for match in ARGUMENT.finditer(about):
        if match[1] in schema["properties"]:
            schema["properties"][match[1]].setdefault("description", " ".join(match[2].split()))
    for each in schema["properties"].values():
        if "enum" in each and all(isinstance(value, str) for value in each["enum"]):
            each.setdefault("type", "string")  # many templates read the type of each parameter
    schema = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
    if definitions:
        schema["$defs"] = definitions
    said = text[: section.start()] if section else text
    return {
        "type": "function",
        "function": {"name": _name(function), "description": said.strip(), "parameters": schema},
    }


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _struct(function: Function) -> Any:
    """Return a msgspec.Struct type whose fields are the parameters of a function."""
    import msgspec

    name = _name(function)
    if not name.isidentifier():
        raise OptionError(f"tools: {name} has no name; define it with def", option="tools", found=name)
    parameters = inspect.signature(function).parameters.values()
    unnamed = next((each for each in parameters if each.kind not in KINDS), None)
    if unnamed is not None:
        message = f"tools: {name} has the parameter {unnamed}, which cannot be given by name; use keyword parameters"
        raise OptionError(message, option="tools", found=name)
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: list[Any] = []
        for each in parameters:
            default = () if each.default is inspect.Parameter.empty else (msgspec.field(default_factory=_Default),)
            fields.append((each.name, hints.get(each.name, Any), *default))
        made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.schema_components([made])
    except (TypeError, ValueError, NameError) as error:
        why = str(error).splitlines()[-1]
        message = f"tools: {name} has a parameter of a type that JSON does not have ({why}); change its annotation"
        raise OptionError(message, option="tools", found=name) from None
    return made


class _Default:
    """The value of a parameter that was left out."""


def call_function(function: Function, arguments: Mapping[str, Any] | None) -> str:
    """Call a function with the arguments that a model has written, and return its result as text.

    If the arguments are invalid or the function raises, return the error's text, so that the model can react to it.
    """
    import msgspec

    if arguments is None:
        return "Error: the arguments are no JSON object"
    try:
        given = msgspec.convert(dict(arguments), _struct(function))
        values = {name: getattr(given, name) for name in given.__struct_fields__}
        found = function(**{name: value for name, value in values.items() if not isinstance(value, _Default)})
    except Exception as error:  # the text is the result, which the model reads
        return f"Error: {type(error).__name__}: {error}"
    if isinstance(found, str):
        return found
    try:
        return msgspec.json.encode(found).decode()
    except (TypeError, ValueError, OverflowError):
        return str(found)
