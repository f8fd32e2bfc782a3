"""Groups of command-line options: a dataclass per subject, declared once and shared by commands.

A field is declared as typer wants a parameter: `name: Annotated[type, typer.Option(...)] = default`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Expand every parameter of `command` whose type is a dataclass into one parameter per field.

    Typer sees the expanded parameters, in order; `command` is called with instances of the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**made, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        parameters += _parameters(group) if group else [parameter.replace(annotation=hints[parameter.name])]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]


def flags_given(*groups: Any) -> dict[str, str]:
    """Return the flag of every option that is not at its default, by field name: `{"depth": "-d"}`."""
    found = {}
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for f in fields(group):
            # An option that may be repeated and was not given is None or an empty list.
            if getattr(group, f.name) not in (f.default, []):
                found[f.name] = _flag(hints[f.name])
    return found


def _flag(hint: Any) -> str:
    """Return the shortest flag of an option; "--kv or --no-kv" for "--kv/--no-kv"."""
    (option,) = hint.__metadata__
    # With Annotated, typer stores an option's first flag in the attribute `default`.
    flags: list[str] = [option.default, *option.param_decls]
    return min(flags, key=len).replace("/", " or ")
