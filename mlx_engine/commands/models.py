"""The command `models`: list the architectures that `mlx_engine/models` declares, and the supported types of weights.

Most fields of a config declare their keys. To find the keys of the other fields, these fields are read from a
`Recorder` instead of a file. The recorder notes each key that is read, and returns the default or a made-up value.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

from mlx_engine.commands.console import reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.values import columns, print_json
from mlx_engine.config.declared import SETTING, Constant, Naming
from mlx_engine.config.settings import REQUIRED, Settings
from mlx_engine.errors import EngineError, OptionError, listed
from mlx_engine.options import option
from mlx_engine.weights.model import Architecture, architectures_of


@reports_errors
@takes_groups
def models(
    keys: str | None = option(
        None, "Print the keys of an architecture's settings, in config.json and in GGUF.", metavar="NAME"
    ),
    json: bool = option(False, "Print one JSON object."),
) -> None:
    """List the supported architectures, and the types of weights that each backend multiplies as they are stored."""
    found = architectures()
    if keys is not None:
        of = keys_of(keys)
        names = sorted({name for each in found for name in each.names})
        if of is None:
            message = f"--keys: no architecture {keys!r}; choose {listed(names)}"
            raise OptionError(message, option="--keys", found=keys)
        print_json(asdict(of)) if json else print_keys(of)
        return
    types = types_by_backend()
    if json:
        print_json({"architectures": [asdict(each) for each in found], "types": types})
        return
    head = ("model_type, architecture", "GGUF", "")
    print("\n".join(columns([head, *((", ".join(a.names), a.gguf, a.title) for a in found)], "<<<")))
    print("\nreadable types, and the backends that multiply them as they are stored")
    backends = list(next(iter(types.values())))
    rows = [(f"  {name}", *("yes" if on[b] else "-" for b in backends)) for name, on in types.items()]
    print("\n".join(columns([("", *backends), *rows], "<" * (1 + len(backends)))))
    print("-: expanded to float32 on load. --keys NAME lists the settings that an architecture reads.")


def types_by_backend() -> dict[str, dict[str, bool]]:
    """Return whether a backend multiplies a type as it is stored: `result[type][backend]`, for available backends."""
    from mlx_engine.backends import backend_names, create_backend, unavailable
    from mlx_engine.quant import readable_types
    from mlx_engine.weights.outline import stored_types

    there = [name for name in backend_names() if unavailable(name) is None]
    stored = {name: stored_types(create_backend(name)) for name in there}
    return {type_.name: {name: type_.name in stored[name] for name in there} for type_ in readable_types()}


def print_keys(keys: Keys) -> None:
    """Print the fields of a config with the keys that they are read from."""
    about = keys.architecture
    print(f"{about.title} (mlx_engine/models/{about.file}.py)\n")
    prefix = f"{about.gguf}."
    rows: list[tuple[Any, ...]] = [("field", "config.json", f"GGUF, below {prefix}")]
    for f in keys.fields:
        pairs = zip_longest(f.hf, f.gguf, fillvalue="")
        rows += [("" if i else f.field, *pair) for i, pair in enumerate(pairs)] or [(f.field, "", "")]
    print("\n".join(columns(rows, "<<<")))
    for title, checked in (("config.json", keys.checked_hf), ("GGUF", keys.checked_gguf)):
        if checked:
            print(f"\nchecked in {title}, because only some values are implemented: {', '.join(checked)}")


# The made-up value of a field that was not read from a `Recorder` (see `_Known`). If the n-th key that is read from a
# recorder has no default, the recorder returns STAND_IN + 2 n. So made-up values are even, and a recorder returns
# different ones for different keys.
STAND_IN = 8


@dataclass(frozen=True)
class Entry:
    """An architecture: the name of its file in `mlx_engine/models`, and fields of `weights.model.Architecture`."""

    file: str
    title: str
    names: tuple[str, ...]
    gguf: str


@dataclass(frozen=True)
class FieldKeys:
    """A field of a config, and the keys that it is read from."""

    field: str
    hf: tuple[str, ...]
    gguf: tuple[str, ...]


@dataclass(frozen=True)
class Keys:
    """The keys of an architecture's settings.

    No field is read from the keys `checked_hf` and `checked_gguf`. The values of these keys are only checked, because
    not all values are implemented.
    """

    architecture: Entry
    fields: tuple[FieldKeys, ...]
    checked_hf: tuple[str, ...]
    checked_gguf: tuple[str, ...]


def architectures() -> list[Entry]:
    """Return all architectures, sorted by file name."""
    return [entry for entry, _ in _files()]


def keys_of(name: str) -> Keys | None:
    """Return the keys of an architecture; None if the name is unknown."""
    found = next((each for each in _files() if name in each[0].names), None)
    if found is None:
        return None
    entry, config = found[0], found[1].config
    hf, gguf = _asked(config, "hf"), _asked(config, "gguf")
    return Keys(
        entry,
        tuple(
            FieldKeys(f.name, hf[f.name], gguf[f.name])
            for f in fields(config)
            if type(f.metadata[SETTING]) is not Constant  # a constant has no key
        ),
        tuple(config.expected.hf),
        tuple(config.expected.gguf),
    )


def _files() -> Iterator[tuple[Entry, Architecture]]:
    """Yield a pair for every architecture: its `Entry`, and its `Architecture`."""
    package = "mlx_engine.models"
    for each in iter_modules(importlib.import_module(package).__path__):
        for of in architectures_of(importlib.import_module(f"{package}.{each.name}")):
            yield Entry(each.name, of.title, of.names, of.gguf), of


def _asked(config: Any, naming: Naming) -> dict[str, tuple[str, ...]]:
    """Return a map from each field of a config class to its keys in config.json ("hf") or in GGUF ("gguf")."""
    known = _Known()
    return {f.name: _read(f, naming, known) for f in fields(config)}


def _read(config_field: Any, naming: Naming, known: _Known) -> tuple[str, ...]:
    """Return the keys that a field is read from. If the field is read from a `Recorder`, add its value to `known`."""
    setting = config_field.metadata[SETTING]
    if hasattr(setting, naming) and hasattr(setting, "kind"):  # the setting declares its keys
        where = getattr(setting, naming)
        keys = [] if where is None else [where if isinstance(where, str) else where[0]]
        return tuple(keys + list(setting.repeated if naming == "gguf" else ()))
    asked = Recorder()
    # A setting may refuse made-up values. The keys that it read before the error are recorded nevertheless.
    with suppress(EngineError, ValueError, TypeError, ArithmeticError, AttributeError):
        setattr(known, config_field.name, setting.read(asked, naming, known))
    return tuple(dict.fromkeys(asked.keys))


class _Known(SimpleNamespace):
    """The values of the fields that were read from a `Recorder`; STAND_IN for every other field."""

    def __getattr__(self, name: str) -> int:
        return STAND_IN


class Recorder(Settings):
    """Settings that record each key that is read, and return its default or, without one, a made-up value."""

    def __init__(self, prefix: str = "", keys: list[str] | None = None) -> None:
        super().__init__({}, where="the catalogue of models")
        self._prefix, self.keys = prefix, [] if keys is None else keys

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Return the default or, without one, False."""
        value = self._get(key, default)
        return value is True

    def whole_or_none(self, key: str, default: Any = REQUIRED) -> int | None:
        """Return the default or, without one, None."""
        value = self._get(key, default)
        return None if default is REQUIRED else value  # type: ignore[return-value]

    def choice(self, key: str, default: str, *others: str) -> str:
        """Return the last choice: with it, configs read the most other keys, and all of these are recorded."""
        self._get(key, default)
        return others[-1] if others else default

    def mapping(self, key: str) -> Settings | None:
        """Return a recorder for the keys inside `key`. It shares the list `keys` with this recorder."""
        self._get(key, None)
        return Recorder(f"{self._prefix}{key}.", self.keys)

    def expect(self, key: str, *allowed: object) -> None:
        """Record the key."""
        self._get(key, None)

    def _get(self, key: str, default: object) -> object:
        self.keys.append(self._prefix + key)
        return STAND_IN + 2 * len(self.keys) if default is REQUIRED else default
