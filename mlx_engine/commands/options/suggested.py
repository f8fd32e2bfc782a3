"""The sampling of `generate` and `chat`: the options that a model's files suggest, and options that have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mlx_engine.commands.options.groups import flags_given
from mlx_engine.errors import EngineError, OptionError
from mlx_engine.options import COLDEST, Sampling, declared

if TYPE_CHECKING:
    from mlx_engine.checkpoint.suggested import Suggested
    from mlx_engine.engine import CheckedCheckpoint

# Options that choose among likely tokens; the penalties and the bias change which token is the most likely one.
IDLE_IF_GREEDY = tuple(f.name for f, about in declared(Sampling) if about.needs_draw)


class Chosen(NamedTuple):
    """The sampling of a run, with lines about what the model's files suggest and about options without an effect."""

    sampling: Sampling
    notes: list[str]
    warnings: list[str]


def choose_sampling(
    invocation: typer.Context, given: Sampling, opened: CheckedCheckpoint, *, suggested: bool
) -> Chosen:
    """Return the given options; with `suggested`, with the suggested values where the command line has none.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests what is not possible.
    """
    if not suggested:
        return Chosen(given, [], without_effect(given, given))
    found, notes, warnings = checked(opened.path, opened.checkpoint.metadata), [], []
    values = {name: value for name, value in found.values.items() if not _is_given(invocation, name)}
    if values:
        notes.append(f"sampling as {Path(found.where).name} suggests: {named(values)}; --no-suggested is greedy")
    if not found.values and _is_given(invocation, "suggested"):
        warnings.append(f"warning: {opened.path} suggests no sampling, so --suggested has no effect")
    if found.unused:
        warnings.append(f"warning: {found.where} also has {', '.join(found.unused)}, which is not implemented")
    used = replace(given, **values)
    return Chosen(used, notes, [*warnings, *without_effect(given, used)])


def offered(invocation: typer.Context, opened: CheckedCheckpoint) -> list[str]:
    """Return a hint if the model's files suggest another sampling than the default, and --temp was not given."""
    try:
        suggested = checked(opened.path, opened.checkpoint.metadata)
    except EngineError:  # a damaged file whose suggestions are not used must not end a run
        return []
    if _is_given(invocation, "temperature") or Sampling(**suggested.values) == Sampling():
        return []
    name, values = Path(suggested.where).name, named(suggested.values)
    return [f"hint: {name} suggests {values}; --suggested samples so, --no-suggested omits this line"]


def without_effect(given: Sampling, used: Sampling) -> list[str]:
    """Return a warning if options were given that do nothing because the decoding is greedy.

    Args:
        given: the options of the command line.
        used: the options of the command line with the suggestions of the model's files.
    """
    flags = flags_given(given)
    idle = [flags[name] for name in IDLE_IF_GREEDY if name in flags]
    if not idle or used.temperature >= COLDEST:
        return []
    have = "has" if len(idle) == 1 else "have"
    why = "at temperature 0, which always takes the most likely token"
    return [f"warning: {', '.join(idle)} {have} no effect {why}; --temp T samples"]


def checked(path: Path, metadata: Mapping[str, object] | None = None) -> Suggested:
    """Return the suggestions of a model's files. The arguments are those of `suggested_sampling`.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests what is not possible.
    """
    from mlx_engine.checkpoint.suggested import suggested_sampling

    suggested = suggested_sampling(path, metadata)
    try:
        Sampling(**suggested.values)
    except OptionError as error:
        message = f"{suggested.where}: {error}; --no-suggested ignores the file"
        option = f"{suggested.where}: {error.option}"
        raise OptionError(message, option=option, expected=error.expected, found=error.found) from error
    return suggested


def described(sampling: Sampling) -> str:
    """Return a line about the options of sampling that are not at their defaults."""
    changed = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    changed = {f.name: changed[f.name] for f in fields(sampling) if changed[f.name] != f.default}
    is_greedy = "temperature" not in changed
    return ", ".join(["greedy"] * is_greedy + [named(changed)] * bool(changed))


def named(values: Mapping[str, Any]) -> str:
    """Return options as text: `temperature 0.6, top_k 20`."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _is_given(invocation: typer.Context, name: str) -> bool:
    """Return whether the command line has an option; its value may be the default."""
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
