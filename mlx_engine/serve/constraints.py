"""The parameters of a request that constrain its answers, under OpenAI's names and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from mlx_engine.constraint import Constraint, without_unsupported
from mlx_engine.errors import OptionError
from mlx_engine.serve.errors import ApiError


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema with a name. Unless it is strict, keywords that are not supported are left out, and named."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The format of an answer, as OpenAI's API names it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One constraint, as vLLM names them: a JSON Schema, any JSON object, an expression, texts, a grammar in Lark."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Asked(NamedTuple):
    """The constraint of a request.

    Attributes:
        constraint: the constraint, or None.
        param: the parameter that has it.
        ignored: the paths of what was left out.
    """

    constraint: Constraint | None = None
    param: str = ""
    ignored: tuple[str, ...] = ()


class ConstraintParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a request that constrain its answers. At most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def asked(self) -> Asked:
        """Return the constraint of the request.

        Raises:
            ApiError: there are several, or it is invalid.
        """
        found = [(param, make) for param, make in self._made() if make is not None]
        if len(found) > 1:
            names = " and ".join(param for param, _ in found)
            message = f"{names} both constrain the answer; give one of them"
            raise ApiError(400, message, param=found[1][0], code="invalid_value")
        if not found:
            return Asked()
        param, make = found[0]
        with named(param):
            made = make()
        return made._replace(param=param) if isinstance(made, Asked) else Asked(made, param)

    def _made(self) -> Iterator[tuple[str, Callable[[], Constraint | Asked] | None]]:
        """Yield the parameters, each with what makes its constraint; None for one that is not given."""
        outputs = self.structured_outputs or StructuredOutputs()
        form, schema = self.response_format, self.response_format and self.response_format.json_schema
        kind = "text" if form is None else form.type
        if kind != "json_schema" and schema is not None:
            raise ApiError(400, "response_format.json_schema needs type: json_schema", param="response_format.type")
        is_made = kind != "text"
        yield "response_format", (lambda: _format(kind, schema)) if is_made else None
        yield "structured_outputs.json_object", Constraint.json_object if outputs.json_object else None
        for prefix, given in (("structured_outputs.", outputs), ("guided_", self)):
            name = "" if prefix == "structured_outputs." else prefix
            for kind, how in HOW.items():
                value = getattr(given, name + kind)
                yield prefix + kind, None if value is None else _calls(how, value)


HOW: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def _calls(how: Callable[[Any], Constraint], value: Any) -> Callable[[], Constraint]:
    return lambda: how(value)


def _format(kind: str, given: JsonSchema | None) -> Constraint | Asked:
    """Return the constraint of a response format that is not text."""
    if kind == "json_object":
        return Constraint.json_object()
    if given is None:
        message = "response_format.json_schema is missing; it has the name and the schema"
        raise ApiError(400, message, param="response_format.json_schema", code="missing_required_parameter")
    if given.schema is None:
        return Constraint.json_object()
    if given.strict:
        return Constraint.json_schema(given.schema)
    schema, left_out = without_unsupported(given.schema)
    return Asked(Constraint.json_schema(schema), ignored=tuple(f"response_format: {path}" for path in left_out))


@contextmanager
def named(param: str) -> Iterator[None]:
    """Make an error about the constraint in this block an error of the parameter that has it."""
    try:
        yield
    except OptionError as error:
        if error.option != "constraint" or not param:
            raise
        message = f"{param}: {str(error).removeprefix('constraint: ').removeprefix('constraint ')}"
        raise ApiError(400, message, param=param, code="invalid_value") from None
