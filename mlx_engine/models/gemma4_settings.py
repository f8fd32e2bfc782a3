"""The settings of Gemma 4 that are not read from one key alone: sizes of kinds of layers and of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.config.declared import Key, Naming, declared
from mlx_engine.config.settings import Settings
from mlx_engine.models.gemma3 import LocalLayers
from mlx_engine.models.gemma4_gguf import PATTERN as LAYERS
from mlx_engine.weights.experts import most_experts

KEY_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


@dataclass(frozen=True)
class GlobalSize:
    """The setting of a size of global layers: one key, or `per_layer_config` of transformers 5.

    Attributes:
        key: the key.
        each: the key of each layer in `per_layer_config`.
        usual: the default; None for the size of local layers.
        gguf: the GGUF keys, which have the same value.
    """

    key: str
    each: str
    usual: int | None
    gguf: tuple[str, ...]

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the size. Without `attention_k_eq_v`, transformers ignores the key of the KV heads."""
        if naming == "gguf":
            size = s.whole(self.gguf[0])
            for key in self.gguf[1:]:
                s.expect(key, size)
            return size
        local = int(getattr(known, "head_dim" if self.each == "head_dim" else "n_kv_heads"))
        usual = local if self.usual is None else self.usual
        layers = s.mapping("per_layer_config")
        if layers is None:
            found = s.whole(self.key, usual)
            return found if self.each == "head_dim" or known.k_is_v else local
        s.whole_or_none(self.key, None)
        sizes = {}
        for i in range(known.n_layers):
            of = layers.mapping(str(i))
            sizes[i] = local if of is None else of.whole(self.each, local)
            if of is not None:
                of.refuse_rest(("head_dim", "num_key_value_heads"))
        layers.refuse_rest()
        everywhere = {sizes[i] for i, is_local in enumerate(known.is_local) if not is_local}
        if len(everywhere) > 1 or any(sizes[i] != local for i, is_local in enumerate(known.is_local) if is_local):
            raise s.error("per_layer_config", f"one {self.each} in local layers and one in global layers", sizes)
        return everywhere.pop() if everywhere else local

    def to_gguf(self, value: int) -> Mapping[str, object]:
        """Return the keys."""
        return dict.fromkeys(self.gguf, value)

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        """Return the key."""
        return {self.key: value}


@dataclass(frozen=True)
class Kinds(LocalLayers):
    """The setting of which layers are local. The last layer of a folder is global, as in transformers."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        """Return for each layer whether it is local."""
        if naming == "hf":
            return (*super().read(s, naming, known)[:-1], False)
        return s.flags(LAYERS, known.n_layers) or ()

    def to_gguf(self, value: tuple[bool, ...]) -> Mapping[str, object]:
        """Return the key with a flag for each layer."""
        return {LAYERS: list(value)}


@dataclass(frozen=True)
class ExpertSize:
    """The setting of a size of the mixture of experts: 0 in models without one, whose config.json may have it too.

    Attributes:
        gguf: the GGUF key.
        hf: the key in config.json.
        is_count: whether it is the number of experts.
    """

    gguf: str
    hf: str
    is_count: bool = False

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the size."""
        if naming == "hf" and not s.flag("enable_moe_block", False):
            s.whole_or_zero(self.hf)
            return 0
        key = self.gguf if naming == "gguf" else self.hf
        n_experts = s.whole_or_zero(key) if self.is_count else known.n_experts
        if n_experts > most_experts(known.n_layers):
            raise s.error(key, f"at most {most_experts(known.n_layers):,}", n_experts)
        return s.whole(key) if n_experts or naming == "hf" else s.whole_or_zero(key)

    def to_gguf(self, value: int) -> Mapping[str, object]:
        """Return the key, if there are experts."""
        return {self.gguf: value} if value else {}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        """Return the key, and whether there are experts."""
        return {self.hf: value or None, "enable_moe_block": config.n_experts > 0}


def flag(gguf: str, hf: str) -> Any:
    """Declare a field that is a flag, False if its key is absent."""
    return declared(Key(Settings.flag, (gguf, False), (hf, False)))


def count(gguf: str, hf: str, usual: int) -> Any:
    """Declare a field that is a whole number >= 0; `usual` is the default in config.json."""
    return declared(Key(Settings.whole_or_zero, (gguf, 0), (hf, usual)))
