"""Declarative configs: each field declares its GGUF key, its key in config.json, its default and its valid values.

A model file derives its `Config` from `ConfigBase`, and declares each field with a function such as `whole`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, ParamSpec, TypeAlias, TypeVar

from mlx_engine.config.settings import HARMLESS, HARMLESS_IN_GGUF, MOST_LAYERS, REQUIRED, Settings

Naming: TypeAlias = Literal["gguf", "hf"]
# Where one kind of file (GGUF or config.json) stores a setting: a key, or (key, default); None if this kind of file has
# no key for it. The default is a value, or a function of the fields that were read before. A key without a default is
# required.
Where: TypeAlias = str | tuple[str, object] | None
# A function of a field's value and the fields that were read before. It returns None if the value is valid, or else a
# description of the valid values.
Condition: TypeAlias = Callable[[Any, Any], str | None]

SETTING = "setting"
# The relative tolerance in comparisons of floats. It is needed because programs compute the same setting by formulas
# that round differently.
CLOSE = 1e-6

C = TypeVar("C", bound="ConfigBase")
P = ParamSpec("P")


class Setting(ABC):
    """How a field of a config is read from a file's settings, and written as GGUF keys or keys of config.json."""

    @abstractmethod
    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        """Return the value of the field; raise UnsupportedConfigError if it is missing, invalid or not implemented.

        `known` has the fields that were read before, and `n_embeddings`, the number of rows of the embedding table.
        """

    def to_gguf(self, value: Any) -> Mapping[str, object]:
        """Return the GGUF keys that store this value, and their values; by default none."""
        return {}

    def to_hf(self, value: Any, config: Any) -> Mapping[str, object]:
        """Return the keys of config.json that store this value, and their values; by default none.

        `config` is the config whose field has the value.
        """
        return {}


@dataclass(frozen=True)
class Key(Setting):
    """A setting that has one key; its value must meet `condition`.

    Attributes:
        kind: the function that reads the key, usually a method of `Settings`, such as `Settings.whole`.
        gguf: the GGUF key without the architecture's prefix, or (key, default). None if GGUF has no key: the field is
            then None, or False if `kind` is `Settings.flag`.
        hf: the same for config.json.
        repeated: more GGUF keys for the setting, which must have the same value if they are present.
    """

    kind: Callable[[Settings, str, Any], Any]
    gguf: Where
    hf: Where
    repeated: tuple[str, ...] = ()
    condition: Condition | None = None

    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        where = self.gguf if naming == "gguf" else self.hf
        if where is None:
            return False if self.kind is Settings.flag else None
        key, default = where if isinstance(where, tuple) else (where, REQUIRED)
        value = self.kind(s, key, default(known) if callable(default) else default)
        expected = self.condition(value, known) if self.condition else None
        if expected is not None:
            raise s.error(key, expected, value)
        for again in self.repeated if naming == "gguf" else ():
            s.expect(again, value)
        return value

    def to_gguf(self, value: Any) -> Mapping[str, object]:
        if self.gguf is None:
            return {}
        return dict.fromkeys((self.gguf if isinstance(self.gguf, str) else self.gguf[0], *self.repeated), value)

    def to_hf(self, value: Any, config: Any) -> Mapping[str, object]:
        return {} if self.hf is None else {self.hf if isinstance(self.hf, str) else self.hf[0]: value}


@dataclass(frozen=True)
class ActivationKey(Setting):
    """The activation of the FFN.

    Attributes:
        words: maps each word in config.json to the activation's name in this engine; the first word is the default.
        gguf: the activation's name for GGUF files. They have no key for it, so all have the activation that llama.cpp
            computes.
        hf: the key in config.json.
    """

    words: Mapping[str, str]
    gguf: str
    hf: str = "hidden_act"

    def read(self, s: Settings, naming: Naming, known: Any) -> str:
        return self.gguf if naming == "gguf" else self.words[s.choice(self.hf, *self.words)]

    def to_hf(self, value: str, config: Any) -> Mapping[str, object]:
        return {self.hf: next(word for word, of in self.words.items() if of == value)}


@dataclass(frozen=True)
class Constant(Setting):
    """A value that is not read from files: fixed, or computed by a function of the fields that were read before.

    Most uses replace the setting of a field that is inherited from another config.
    """

    value: Any

    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        return self.value(known) if callable(self.value) else self.value


@dataclass(frozen=True)
class Expected:
    """Settings for which only some values are implemented, so that the config needs no field for them.

    Attributes:
        gguf: maps each GGUF key to the implemented value, a tuple of implemented values, or a function of (settings,
            key, config) that checks the setting. Unless a function requires it, the key may be absent from the file.
        hf: the same for the keys of config.json.
        harmless: keys of config.json that do not affect the forward pass, whatever their value.
    """

    gguf: Mapping[str, object] = field(default_factory=dict)
    hf: Mapping[str, object] = field(default_factory=dict)
    harmless: Collection[str] = ()


@dataclass(frozen=True)
class ConfigBase:
    """The base class of configs. Each field is read and written by its `Setting`."""

    expected: ClassVar[Expected] = Expected()
    # Class variables that `models/standard.py` and `layer.Attention.read` use:
    # layer_norms: norms without a bias are layer norms, not RMS norms. Norms with a bias are always layer norms.
    # is_parallel: attention and FFN read the same hidden states (a parallel block).
    # norms_after_rope: heads of queries and keys are normed after the rotary embedding, not before.
    # only_local_rope: in a model with sliding windows, only the layers with a window have rotary embedding.
    layer_norms: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = False
    norms_after_rope: ClassVar[bool] = False
    only_local_rope: ClassVar[bool] = False

    @property
    def gguf_architecture(self) -> str | None:
        """The `general.architecture` to write to a GGUF file, if it depends on the settings; usually None."""
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer, in tokens; None for all tokens, -C for chunks of C tokens.

        A config with a window has the field `window`, and `is_local` if some layers have no window.
        """
        of: Any = self
        window = getattr(of, "window", None) or None
        return tuple(window if has_window else None for has_window in getattr(of, "is_local", (True,) * of.n_layers))

    def of_layer(self, i: int) -> Any:
        """Return the config with the sizes of layer i; this config, unless the layers of the model differ."""
        return self

    @classmethod
    def read(cls: type[C], s: Settings, naming: Naming, n_embeddings: int = 1) -> C:
        """Read the fields in their order; raise UnsupportedConfigError for a wrong or an undeclared setting.

        Args:
            s: for "gguf", the metadata without the architecture's prefix; for "hf", config.json.
            naming: the kind of file.
            n_embeddings: number of rows of the embedding table in a GGUF file.
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
        s.refuse_rest({*HARMLESS, *cls.expected.harmless} if naming == "hf" else HARMLESS_IN_GGUF)
        return config

    def to_gguf(self) -> dict[str, object]:
        """Return the GGUF keys of this config, without the architecture's prefix."""
        keys: dict[str, object] = {}
        for f in fields(self):
            keys |= f.metadata[SETTING].to_gguf(getattr(self, f.name))
        return keys

    def to_hf(self) -> dict[str, object]:
        """Return the keys of config.json: those of the fields, and the keys in `expected.hf`.

        A key in `expected.hf` gets its first implemented value. The key is left out if this value is None, or if a
        function checks the setting.
        """
        keys: dict[str, object] = {}
        for key, allowed in self.expected.hf.items():
            value = allowed[0] if isinstance(allowed, tuple) else allowed
            if value is not None and not callable(value):
                keys[key] = value
        for f in fields(self):
            keys = merged(keys, f.metadata[SETTING].to_hf(getattr(self, f.name), self))
        return keys

    def differences(self, other: object) -> list[str]:
        """Return the names of the fields in which `other` differs; fields with compare=False are not compared."""
        compared = (f.name for f in fields(self) if f.compare)
        return [name for name in compared if not is_same(getattr(self, name), getattr(other, name, None))]


def merged(keys: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of both mappings. If a key's values are both mappings, merge them; else prefer that in `more`."""
    made = dict(keys)
    for key, value in more.items():
        before = made.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        made[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return made


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, with the tolerance CLOSE for floats and for floats in dataclasses."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=CLOSE)
    if is_dataclass(a) and type(a) is type(b):
        return all(is_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def declared(setting: Setting, *, compare: bool = True) -> Any:
    """Declare a field with its setting. `compare` is False if the field does not change what the model computes."""
    return field(metadata={SETTING: setting}, compare=compare)


def declares(setting: Callable[P, Setting]) -> Callable[P, Any]:
    """Return a function that declares a field. Its arguments are those of the class `setting`."""
    return lambda *args, **kwargs: declared(setting(*args, **kwargs))


activation_key = declares(ActivationKey)
constant = declares(Constant)


def whole(gguf: Where, hf: Where, *, repeated: tuple[str, ...] = (), condition: Condition | None = None) -> Any:
    """Declare a field that is a whole number >= 1. `Key` describes the arguments."""
    return declared(Key(Settings.whole, gguf, hf, repeated, condition))


def main_layers(s: Settings, key: str, default: Any) -> int:
    """Return the number of layers without those of multi-token prediction (MTP), which `block_count` includes."""
    n, extra = s.whole(key, default), s.whole_or_zero("nextn_predict_layers") if key == "block_count" else 0
    if extra >= n:
        raise s.error("nextn_predict_layers", f"fewer than all {n} layers", extra)
    return n - extra


def n_layers() -> Any:
    """Declare the field `n_layers`, without layers of multi-token prediction."""
    return declared(Key(main_layers, "block_count", "num_hidden_layers", condition=believable))


def whole_or_none(gguf: Where, hf: Where) -> Any:
    """Declare a field that is a whole number >= 1, or None if the value is null or this kind of file has no key."""
    return declared(Key(Settings.whole_or_none, gguf, hf))


def whole_or_zero(gguf: Where, hf: Where) -> Any:
    """Declare a field that is a whole number >= 0."""
    return declared(Key(Settings.whole_or_zero, gguf, hf))


def flag(gguf: Where, hf: Where) -> Any:
    """Declare a field that is True or False."""
    return declared(Key(Settings.flag, gguf, hf))


def said(hf: Where) -> Any:
    """Declare a flag that tells whether files have certain tensors.

    These tensors' rows in the model's tensor table have the field's name in `Row.when` (`weights/table.py`). GGUF has
    no key for the flag. For a GGUF file, `said_by_tensors` of that module sets it if the tensors exist.
    """
    return flag(None, hf)


def number(gguf: Where, hf: Where) -> Any:
    """Declare a field that is a finite number > 0."""
    return declared(Key(Settings.number, gguf, hf))


# ---- functions that compute defaults from the fields that were read before, and conditions (`Condition`) ----


# The largest accepted head dim, far above any model's. Without a limit, the rotary tables of a damaged file could
# exhaust the memory.
WIDEST_HEAD = 65_536


def n_embeddings(known: Any) -> int:
    """Return the default vocabulary size: the number of rows of the embedding table."""
    return int(known.n_embeddings)


def one_per_head(known: Any) -> int:
    """Return the default number of KV heads: one per query head, as in models without grouped-query attention."""
    return int(known.n_heads)


def per_head(known: Any) -> int:
    """Return the default width of a head: hidden_size // n_heads."""
    return max(1, int(known.hidden_size // known.n_heads))


def believable(n_layers: int, known: Any) -> str | None:
    """Check that the number of layers is at most `MOST_LAYERS`."""
    return None if n_layers <= MOST_LAYERS else f"at most {MOST_LAYERS:,}"


def divides(name: str) -> Condition:
    """Return the condition that the value divides the earlier field `name`."""

    def condition(value: int, known: Any) -> str | None:
        of = getattr(known, name)
        return f"a divisor of {name}, {of}" if of % value else None

    return condition


def halves(head_dim: int, known: Any) -> str | None:
    """Check that the head dim is even and at most `WIDEST_HEAD`."""
    if head_dim % 2:
        return "an even number, because RoPE rotates pairs of elements"
    return None if head_dim <= WIDEST_HEAD else f"at most {WIDEST_HEAD:,}"


def rotated_heads(
    usual: int | Callable[[Any], int] = per_head,
    in_gguf: int | Callable[[Any], int] = per_head,
    *,
    partly: bool = False,
) -> Any:
    """Declare the field `head_dim` of a model with RoPE.

    Args:
        usual: the default in config.json.
        in_gguf: the default in GGUF files.
        partly: whether RoPE may rotate only a part of each head.
    """
    repeated = ("attention.value_length",) if partly else ("attention.value_length", "rope.dimension_count")
    return whole(("attention.key_length", in_gguf), ("head_dim", usual), repeated=repeated, condition=halves)


def partly_rotated_heads(usual: int | Callable[[Any], int] = per_head) -> Any:
    """Declare the field `head_dim` of a model whose RoPE may rotate only a part of each head."""
    return rotated_heads(usual, partly=True)


def convolves(n_tokens: int, known: Any) -> str | None:
    """Check that a convolution reads at least 2 tokens: its state, `n_tokens - 1` tokens, must not be empty."""
    return None if n_tokens >= 2 else "2 or more tokens"


def each_layer(*kinds: str) -> Callable[[Settings, str, Any], object]:
    """Return a function that checks a list of layer kinds: if the list is present, it has one of `kinds` per layer."""
    return lambda s, key, config: s.words(key, config.n_layers, *kinds)


def same_as(name: str) -> Callable[[Settings, str, Any], object]:
    """Return a function that checks a setting: if present, it must equal the config's field `name`."""
    return lambda s, key, config: s.expect(key, getattr(config, name))


def stated(value: str) -> Callable[[Settings, str, Any], object]:
    """Return a function that checks that a setting is present and has this value. A missing key means another value."""
    return lambda s, key, config: s.choice(key, REQUIRED, value)
