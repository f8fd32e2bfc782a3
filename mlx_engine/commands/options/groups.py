"""Groups of command-line options: a dataclass per subject, declared once and shared by commands.

An option is a field of a group or a parameter of a command. Declare it with `mlx_engine.options.option` or, if it needs
other features of typer, such as a callback, as `name: Annotated[type, typer.Option(...)] = default`. The first sentence
of a group's docstring is the title of its panel in help. An option is rare if it is declared with `is_rare`, or if
its annotation or its group's annotation has `RARE`. Rare options are listed by `--help-all`, but not by `--help`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mlx_engine.commands.options.help import first_sentence, show_all
from mlx_engine.options import About

RARE = "rare"

# Maps each type of option to the placeholder of its value in help.
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}

AllHelp = Annotated[
    bool,
    typer.Option(
        "--help-all",
        callback=show_all,
        is_eager=True,
        help="Show all options; --help leaves out rarely needed ones.",
    ),
]


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Expand every parameter of `command` whose type is a dataclass into one parameter per field.

    Typer sees the expanded parameters, in order; `command` is called with instances of the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: group for name, hint in hints.items() if is_dataclass(group := getattr(hint, "__origin__", hint))}

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        made = {name: _made(group, given) for name, group in groups.items()}
        given.pop("help_all", None)
        command(**made, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group, hint = groups.get(parameter.name), hints[parameter.name]
        if isinstance(parameter.default, Field):
            declared = parameter.default
            hint = _annotation(parameter.name, hint, declared.metadata["about"])
            parameter = parameter.replace(default=declared.default)
        is_rare = RARE in getattr(hint, "__metadata__", ())
        parameters += parameters_of(group, is_rare=is_rare) if group else [parameter.replace(annotation=_named(hint))]
    rare = {p.name for p in parameters if RARE in getattr(p.annotation, "__metadata__", ())}
    if rare:
        parameters.append(_parameter("help_all", default=False, annotation=AllHelp))
    expanded.rare = rare  # type: ignore[attr-defined]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameter(name: str, *, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parameters_of(group: Any, *, is_rare: bool = False) -> list[inspect.Parameter]:
    """Return a parameter for each option of a group and of its nested groups, with the title of its group's panel."""
    title, found = first_sentence(group.__doc__), []
    for f, hint in _hinted(group):
        if is_dataclass(hint):
            found += parameters_of(hint, is_rare=is_rare)
            continue
        hint = _named(Annotated[hint, RARE] if is_rare else hint, title)
        found.append(_parameter(f.name, default=None if f.default == () else f.default, annotation=hint))
    return found


def _named(hint: Any, title: str | None = None) -> Any:
    """Return the annotation of an option, with the value's placeholder and the panel's title added if missing."""
    for info in getattr(hint, "__metadata__", ()):
        if isinstance(info, typer.models.ParameterInfo):
            info.rich_help_panel = info.rich_help_panel or title
        if isinstance(info, typer.models.OptionInfo):
            kinds = {hint.__origin__, *get_args(hint.__origin__)}
            info.metavar = info.metavar or next((word for kind, word in METAVARS.items() if kind in kinds), None)
    return hint


def _hinted(group: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Yield (field, annotation) for each nested group of a group, and for each of its options that has a flag."""
    hints = get_type_hints(group, include_extras=True)
    for f in fields(group):
        about = f.metadata.get("about")
        if about is not None and not about.has_flag:
            continue
        yield f, hints[f.name] if about is None else _annotation(f.name, hints[f.name], about)


def _annotation(name: str, hint: Any, about: About) -> Any:
    """Return the annotation of a declared option: its type on the command line, and typer's option."""
    flags = about.flags or ("--" + name.replace("_", "-"),)
    others = [f"--{alias.replace('_', '-')}" for alias in (*about.aliases, name)]
    known = [flag for names in flags for flag in names.split("/")]
    flags = (*flags, *(flag for flag in dict.fromkeys(others) if flag not in known))
    shown: Any = about.unset or True
    # If `About.kind` is set, `mlx_engine.options.check` checks the bounds, so that Python and the command line have the
    # same error message.
    bounds: dict[str, Any] = {"min": about.least, "max": about.most} if about.kind is None else {}
    option = typer.Option(*flags, help=about.help, metavar=about.metavar, show_default=shown, **bounds)
    kind = list[str] | None if get_origin(hint) is tuple else hint
    return Annotated[kind, option, RARE] if about.is_rare else Annotated[kind, option]


def _made(group: Any, given: dict[str, Any]) -> Any:
    """Remove the values of a group's options from `given`, and return an instance of the group with these values."""
    values: dict[str, Any] = {}
    for f, hint in _hinted(group):
        if is_dataclass(hint):
            values[f.name] = _made(hint, given)
            continue
        value = given.pop(f.name)
        values[f.name] = f.default if value is None else value
    return group(**values)


def flags_given(*groups: Any) -> dict[str, str]:
    """Return a map from the field name of each option that is not at its default to its flag: `{"depth": "-d"}`."""
    found = {}
    for group in groups:
        for f, hint in _hinted(type(group)):
            # If an option that may be repeated is not given, its value is None or an empty list.
            if not is_dataclass(hint) and getattr(group, f.name) not in (f.default, []):
                found[f.name] = _flag(hint)
    return found


def _flag(hint: Any) -> str:
    """Return the shortest flag of an option; "--kv or --no-kv" for "--kv/--no-kv"."""
    option = get_args(hint)[1]
    # With Annotated, typer stores an option's first flag in the attribute `default`.
    flags: list[str] = [option.default, *option.param_decls]
    return min(flags, key=len).replace("/", " or ")
