"""The sampling that a model's files suggest, as options of the commands, and its description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlx_engine.checkpoint.suggested import Suggested, suggested_sampling
from mlx_engine.commands.options import SamplingOptions
from mlx_engine.errors import OptionError

if TYPE_CHECKING:
    from mlx_engine.backends.sampling import Sampling


def with_suggested(
    invocation: typer.Context, sampling: SamplingOptions, path: Path
) -> tuple[SamplingOptions, list[str]]:
    """Return the options with the suggested values where the command line has none, and lines about them.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests what is not possible.
    """
    suggested = checked(path)
    values = {name: value for name, value in suggested.values.items() if not _is_given(invocation, name)}
    lines = []
    if values:
        lines.append(f"sampling as {Path(suggested.where).name} suggests: {named(values)}; --no-suggested is greedy")
    if suggested.unused:
        lines.append(f"warning: {suggested.where} also has {', '.join(suggested.unused)}, which is not implemented")
    return replace(sampling, **values), lines


def checked(path: Path) -> Suggested:
    """Return the suggestions of a model's files.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests what is not possible.
    """
    from mlx_engine.backends.sampling import Sampling

    suggested = suggested_sampling(path)
    try:
        Sampling(**suggested.values)
    except OptionError as error:
        option = f"{suggested.where}: {error.option}"
        expected = f"{error.expected} (--no-suggested ignores the file)"
        raise OptionError(option=option, expected=expected, found=error.found) from error
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
