"""Configs as declarations: a field names its GGUF key, its key in config.json, its default and its condition, once.

A model file derives its `Config` from `Declared` and makes each field with `whole`, `number` or `declared`.
`Declared.read` makes a config of a file's settings in either naming, `Declared.to_gguf` the keys of a GGUF file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from mlx_engine.models.settings import HF_HARMLESS, MOST_LAYERS, REQUIRED, Settings

Naming: TypeAlias = Literal["gguf", "hf"]
# A key; or a key and the default for files that lack it, which is a value or a function of the fields before.
Where: TypeAlias = str | tuple[str, object] | None
# A function of a value and the fields before: what was expected, or None if the value is sound.
Condition: TypeAlias = Callable[[Any, Any], str | None]

SETTING = "setting"
# Far above any model. For a damaged width frequencies would be made until memory ends.
WIDEST_HEAD = 65_536
# The relative error up to which two floats are one value: a default may have been computed in another way.
CLOSE = 1e-6

C = TypeVar("C", bound="Declared")


class Setting(Protocol):
    """How a field is read from a file's settings, and written to a GGUF file."""

    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        """Return the value; `known` has the fields before it, and `n_embeddings`.

        Raises:
            UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
        """

    def to_gguf(self, value: Any) -> Mapping[str, object]:
        """Return the keys of a GGUF file that say this value."""


@dataclass(frozen=True)
class Key:
    """A value that one key says.

    Attributes:
        kind: the method of `Settings` that reads it.
        gguf: the key below the architecture's prefix; None where GGUF has none, and the value is None.
        hf: the key in config.json; None where that has none.
        repeated: GGUF keys that have to say the same, if they are there.
        condition: what must hold.
    """

    kind: Callable[[Settings, str, Any], Any]
    gguf: Where
    hf: Where
    repeated: tuple[str, ...] = ()
    condition: Condition | None = None

    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        """Return the key's value, or its default."""
        where = self.gguf if naming == "gguf" else self.hf
        if where is None:
            return None
        key, default = where if isinstance(where, tuple) else (where, REQUIRED)
        value = self.kind(s, key, default(known) if callable(default) else default)
        expected = self.condition(value, known) if self.condition else None
        if expected is not None:
            raise s.error(key, expected, value)
        for again in self.repeated if naming == "gguf" else ():
            s.expect(again, value)
        return value

    def to_gguf(self, value: Any) -> Mapping[str, object]:
        """Return the key, and those that repeat it."""
        if self.gguf is None:
            return {}
        return dict.fromkeys((self.gguf if isinstance(self.gguf, str) else self.gguf[0], *self.repeated), value)


@dataclass(frozen=True)
class Expected:
    """Settings that are no field, and change nothing as they are expected.

    Attributes:
        gguf: the value that is implemented, by GGUF key, or a tuple of such values; the key may be absent. A function
            of (settings, key, config) checks what depends on the config.
        hf: the same for config.json.
        harmless: keys of config.json that change nothing in the forward pass, whatever their value.
    """

    gguf: Mapping[str, object] = field(default_factory=dict)
    hf: Mapping[str, object] = field(default_factory=dict)
    harmless: Collection[str] = ()


@dataclass(frozen=True)
class Declared:
    """A config whose fields say how files name them."""

    expected: ClassVar[Expected] = Expected()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, how many of the latest tokens a token attends to; None is all."""
        return (None,) * int(getattr(self, "n_layers"))  # noqa: B009 - a field of every config

    @classmethod
    def read(cls: type[C], s: Settings, naming: Naming, n_embeddings: int = 1) -> C:
        """Return the config that the settings say, in order of the fields.

        Args:
            s: GGUF metadata below the architecture's prefix, or config.json.
            naming: which of the two.
            n_embeddings: rows of a GGUF file's embedding table.

        Raises:
            UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
        """
        known = SimpleNamespace(n_embeddings=n_embeddings)
        for f in fields(cls):
            setattr(known, f.name, f.metadata[SETTING].read(s, naming, known))
        config = cls(**{f.name: getattr(known, f.name) for f in fields(cls)})
        for key, allowed in (cls.expected.gguf if naming == "gguf" else cls.expected.hf).items():
            if callable(allowed):
                allowed(s, key, config)
            else:
                s.expect(key, *(allowed if isinstance(allowed, tuple) else (allowed,)))
        s.refuse_rest({*HF_HARMLESS, *cls.expected.harmless} if naming == "hf" else ())
        return config

    def to_gguf(self) -> dict[str, object]:
        """Return what a GGUF file says of this config, without the architecture's prefix."""
        keys: dict[str, object] = {}
        for f in fields(self):
            keys |= f.metadata[SETTING].to_gguf(getattr(self, f.name))
        return keys

    def differences(self, other: object) -> list[str]:
        """Return the fields in which another config is not this one; a field that it lacks is None there."""

        def is_same(a: object, b: object) -> bool:
            both_floats = isinstance(a, float) and isinstance(b, float)
            return math.isclose(a, b, rel_tol=CLOSE) if both_floats else a == b  # type: ignore[arg-type]

        return [f.name for f in fields(self) if not is_same(getattr(self, f.name), getattr(other, f.name, None))]


def declared(setting: Setting) -> Any:
    """Declare a field that is read and written by `setting`."""
    return field(metadata={SETTING: setting})


def whole(gguf: Where, hf: Where, *, repeated: tuple[str, ...] = (), condition: Condition | None = None) -> Any:
    """Declare a field that is a whole number >= 1.

    Args:
        gguf: GGUF's key below the architecture's prefix, or the key and the default where a file lacks it.
        hf: the same for config.json.
        repeated: GGUF keys that have to say the same, if they are there.
        condition: what must hold.
    """
    return declared(Key(Settings.whole, gguf, hf, repeated, condition))


def whole_or_none(gguf: Where, hf: Where) -> Any:
    """Declare a field that is a whole number >= 1, or None where a file says null or its naming has no key."""
    return declared(Key(Settings.whole_or_none, gguf, hf))


def number(gguf: Where, hf: Where) -> Any:
    """Declare a field that is a finite number > 0."""
    return declared(Key(Settings.number, gguf, hf))


def n_embeddings(known: Any) -> int:
    """Return the number of rows of the embedding table, a default."""
    return int(known.n_embeddings)


def one_per_head(known: Any) -> int:
    """Return the number of query heads, a default: each has keys and values of its own."""
    return int(known.n_heads)


def per_head(known: Any) -> int:
    """Return hidden_size / n_heads, a default: the model's width is dealt out to the heads."""
    return max(1, int(known.hidden_size // known.n_heads))


def believable(n_layers: int, known: Any) -> str | None:
    """Refuse a damaged number of layers before something is made for each."""
    return None if n_layers <= MOST_LAYERS else f"at most {MOST_LAYERS:,}"


def divides(name: str) -> Condition:
    """Return the condition that a field before is a multiple of the value."""

    def condition(value: int, known: Any) -> str | None:
        of = getattr(known, name)
        return f"a divisor of {name}, {of}" if of % value else None

    return condition


def halves(head_dim: int, known: Any) -> str | None:
    """Refuse a head that cannot be rotated."""
    if head_dim % 2:
        return "an even number, for its halves are rotated against each other"
    return None if head_dim <= WIDEST_HEAD else f"at most {WIDEST_HEAD:,}"


def each_layer(*kinds: str) -> Callable[[Settings, str, Any], object]:
    """Return the expectation that a list names, if it is there, one of these kinds for every layer."""
    return lambda s, key, config: s.words(key, config.n_layers, *kinds)
