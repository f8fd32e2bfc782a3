"""The parameters of a request that constrain its answers, under OpenAI's names and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from mlx_engine.constraint import Constraint, without_unsupported
from mlx_engine.errors import OptionError
from mlx_engine.serve.errors import ApiError


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema with a name. If it is not strict, unsupported keywords are dropped, and the reply names them."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The format of an answer, as OpenAI's API names it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A constraint under vLLM's names: JSON Schema, any JSON object, regular expression, texts, or Lark grammar."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Asked(NamedTuple):
    """The constraint of a request.

    Attributes:
        constraint: the constraint, or None.
        param: the parameter that has the constraint.
        ignored: the paths of the keywords that were dropped.
    """

    constraint: Constraint | None = None
    param: str = ""
    ignored: tuple[str, ...] = ()


HOW: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


class Parameters(Protocol):
    """The parameters of a request that constrain its answers."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def asked(given: Parameters) -> Asked:
    """Return the constraint of a request.

    Raises:
        ApiError: there are several, or it is invalid.
    """
    found = [(param, make) for param, make in _made(given) if make is not None]
    if not found:
        return Asked()
    if len(found) > 1:
        names = " and ".join(param for param, _ in found)
        message = f"{names} both constrain the answer; give one of them"
        raise ApiError(400, message, param=found[1][0], code="invalid_value")
    param, make = found[0]
    with named(param):
        made = make()
    return made._replace(param=param) if isinstance(made, Asked) else Asked(made, param)


def asked_format(form: ResponseFormat, param: str) -> Asked:
    """Return the constraint of an answer's format in another API, in the parameter of this name.

    Raises:
        ApiError: it is invalid.
    """
    if form.type == "text" and form.json_schema is None:
        return Asked()
    with named(param):
        made = _format(form, param)
    return made._replace(param=param) if isinstance(made, Asked) else Asked(made, param)


def _made(given: Parameters) -> Iterator[tuple[str, Callable[[], Constraint | Asked] | None]]:
    """Yield each parameter with a function that makes its constraint; None for a parameter that is not given."""
    form = given.response_format or ResponseFormat(type="text")
    is_made = form.type != "text" or form.json_schema is not None
    yield "response_format", partial(_format, form) if is_made else None
    outputs = given.structured_outputs or StructuredOutputs()
    yield "structured_outputs.json_object", Constraint.json_object if outputs.json_object else None
    for name, how in HOW.items():
        for param, value in (
            (f"structured_outputs.{name}", getattr(outputs, name)),
            (f"guided_{name}", getattr(given, f"guided_{name}")),
        ):
            yield param, None if value is None else partial(how, value)


def _format(form: ResponseFormat, param: str = "response_format") -> Constraint | Asked:
    """Return the constraint of a response format that is not text."""
    given = form.json_schema
    if (form.type == "json_schema") is not (given is not None):
        message = f"{param}: type json_schema has json_schema, with a name and a schema, and no other type has"
        raise ApiError(400, message, param=f"{param}.json_schema", code="invalid_value")
    if given is None or given.schema is None:
        return Constraint.json_object()
    if given.strict:
        return Constraint.json_schema(given.schema)
    schema, left_out = without_unsupported(given.schema)
    return Asked(Constraint.json_schema(schema), ignored=tuple(f"{param}: {path}" for path in left_out))


@contextmanager
def named(param: str) -> Iterator[None]:
    """Convert errors about the constraint in this block to errors of the parameter."""
    try:
        yield
    except OptionError as error:
        if error.option != "constraint" or not param:
            raise
        message = f"{param}: {str(error).removeprefix('constraint: ').removeprefix('constraint ')}"
        raise ApiError(400, message, param=param, code="invalid_value") from None
