"""`--allow-setting`: open a checkpoint without those named settings that are not implemented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.errors import OptionError, UnsupportedConfigError, shown
from mlx_engine.weights.model import architecture_of

OPTION = "--allow-setting"


def open_model(path: Path, allow_settings: Sequence[str] = ()) -> Checkpoint:
    """Open a model file, and drop the named settings that are not implemented.

    Args:
        path: a GGUF file or a Hugging Face folder.
        allow_settings: names of settings; a nested one is "rope_scaling.factor", and a GGUF key may have the
            architecture's prefix or not. A setting that is implemented keeps its meaning.

    Raises:
        OptionError: the file has no setting of a name.
        SourceError, FormatError: the file cannot be opened, or is damaged.
        ModelError: the architecture, or a setting that is not named, is not implemented.
    """
    check_allowed(allow_settings)
    checkpoint = open_checkpoint(path)
    return allow(checkpoint, allow_settings) if allow_settings else checkpoint


def check_allowed(allow_settings: object) -> None:
    """Check the option `allow_settings`; raise OptionError unless it is a list or tuple of names."""
    if not (isinstance(allow_settings, list | tuple) and all(isinstance(name, str) for name in allow_settings)):
        message = f"allow_settings must be a list of names, not {shown(allow_settings)}"
        raise OptionError(message, option="allow_settings", found=allow_settings)


def allow(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint without the named settings that its model file refuses, with a note on each of them."""
    paths = {name: _path(checkpoint, name) for name in names}
    plan, ignored = architecture_of(checkpoint).plan, dict[str, object]()
    while True:
        try:
            plan(checkpoint)
            break
        except UnsupportedConfigError as error:
            refused = error.name or ""
            name = next((n for n in paths if n not in ignored and f"{refused}.".startswith(_dotted(paths[n]))), None)
            if name is None:
                raise
            settings, ignored[name] = _without(checkpoint.settings, paths[name])
            checkpoint = replace(checkpoint, settings=settings)
    return replace(checkpoint, notes=tuple(_note(name, ignored) for name in paths))


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path) + "."


def _path(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    """Return the keys that lead to a setting; raise OptionError if there is none."""
    bare = name.removeprefix(f"{checkpoint.architecture}.") if checkpoint.naming == "gguf" else name
    at, keys = cast("Mapping[str, Any]", checkpoint.settings), list[str]()
    # A key may contain dots, so each step first tries the whole rest as one key.
    rest = bare
    while rest not in at:
        key, _, rest = rest.partition(".")
        if not rest or not isinstance(at.get(key), Mapping):
            raise OptionError(f"{OPTION}: {checkpoint.where} has no setting {name!r}", option=OPTION, found=name)
        keys.append(key)
        at = at[key]
    return (*keys, rest)


def _without(settings: Mapping[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], object]:
    """Return a copy of the settings without the one at `path`, and its value."""
    key, *rest = path
    if not rest:
        return {other: value for other, value in settings.items() if other != key}, settings[key]
    inner, value = _without(settings[key], rest)
    return {**settings, key: inner}, value


def _note(name: str, ignored: Mapping[str, object]) -> str:
    if name not in ignored:
        return f"{OPTION} {name}: not needed, the setting is implemented or changes nothing"
    return f"{OPTION} {name}: {shown(ignored[name])} is not implemented and was ignored; results may be wrong"
