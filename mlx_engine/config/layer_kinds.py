"""Settings that differ between layers: the kind of each layer (one of two), and numbers that only some layers have.

The two kinds are, for example, layers with sliding-window and full attention, or with and without rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.config.declared import Naming, Setting, declares
from mlx_engine.config.settings import Settings

LOCAL = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class LayerKinds(Setting):
    """A flag per layer: True for layers of the first of two kinds, False for the second kind.

    Attributes:
        every: the default of the interval n; of every n layers, the last one is of the second kind.
        names: the names of both kinds in config.json's `layer_types`; None if the kinds are not listed there.
        interval: maps "gguf" and "hf" (config.json) to the key of n, if such files have the key.
        flags: maps "gguf" and "hf" to the key of a list with one flag per layer, if such files have the list.
        if_window: whether only models with a window have layers of the first kind.
        ends_with_second: whether a Hugging Face folder's last layer is of the second kind, whatever `layer_types` says.
        writes_usual: whether n is written to GGUF files even if it equals the default, `every`.
        begins: whether the first of every n layers, not the last, is of the second kind; then `interval` must be empty.
    """

    every: int
    names: tuple[str, str] | None = LOCAL
    interval: Mapping[Naming, str] = field(default_factory=dict)
    flags: Mapping[Naming, str] = field(default_factory=dict)
    if_window: bool = False
    ends_with_second: bool = False
    writes_usual: bool = False
    begins: bool = False

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        n, found = int(known.n_layers), None
        every = s.whole(self.interval[naming], self.every) if naming in self.interval else self.every
        if naming in self.flags:
            found = s.flags(self.flags[naming], n)
        elif naming == "hf" and self.names:
            words = s.words("layer_types", n, *self.names)
            found = None if words is None else tuple(word == self.names[0] for word in words)
        found = found or tuple((i + (not self.begins)) % every != 0 for i in range(n))
        if self.if_window and not known.window:
            return (False,) * n
        return (*found[:-1], False) if naming == "hf" and self.ends_with_second else found

    def to_gguf(self, value: tuple[bool, ...]) -> Mapping[str, object]:
        if "gguf" in self.flags:
            return {} if self.if_window and not any(value) else {self.flags["gguf"]: list(value)}
        n = _interval(value)
        is_usual = n == self.every or len(value) < min(n, self.every)
        is_written = "gguf" in self.interval and (self.writes_usual or not is_usual)
        return {self.interval["gguf"]: n} if is_written else {}

    def to_hf(self, value: tuple[bool, ...], config: Any) -> Mapping[str, object]:
        if "hf" in self.flags:
            return {self.flags["hf"]: [int(is_first) for is_first in value]}
        first, second = self.names or LOCAL
        made = {"layer_types": [first if is_first else second for is_first in value]}
        return made | ({self.interval["hf"]: _interval(value)} if "hf" in self.interval else {})


def _interval(value: tuple[bool, ...]) -> int:
    """Return the number of layers up to the first one of the second kind, inclusive; n_layers + 1 if there is none."""
    return value.index(False) + 1 if False in value else len(value) + 1


layer_kinds = declares(LayerKinds)


@dataclass(frozen=True)
class OfSomeLayers(Setting):
    """A number that only some layers have, such as the number of KV heads.

    config.json has the number once. GGUF files have the number, or a list with the number or 0 for each layer;
    `to_gguf` of the model's `Config` writes the list.
    """

    gguf: str
    hf: str

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "hf":
            return s.whole(self.hf)
        found = s.counts(self.gguf, known.n_layers) or []
        different = {n for n in found if n}
        if len(different) != 1:
            raise s.error(self.gguf, "0 for some layers, and the same number for the others", found)
        return different.pop()

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.hf: value}
