"""The settings of Qwen3.5 that are not read from one key alone: the kinds of layers, rotation, and value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_engine.config.declared import Naming
from mlx_engine.config.settings import Settings
from mlx_engine.models.qwen3_5_tensors import ATTENTION, DELTA

INTERVAL = 4
# Three position ids (time, height, width) are equal for text: how they share the frequencies does not matter.
MROPE = ("mrope_section", "mrope_interleaved")
# The sections that llama.cpp expects in every file.
SECTIONS = [11, 11, 10, 0]


class Kinds:
    """The setting of each layer's kind: every n-th has attention, or config.json's `layer_types`."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[str, ...]:
        """Return the kind of each layer."""
        interval = s.whole("full_attention_interval", INTERVAL)
        named = s.words("layer_types", known.n_layers, ATTENTION, DELTA) if naming == "hf" else None
        return tuple(named or [DELTA if (i + 1) % interval else ATTENTION for i in range(known.n_layers)])

    def to_gguf(self, value: tuple[str, ...]) -> Mapping[str, object]:
        """Return the key of the interval."""
        return {"full_attention_interval": value.index(ATTENTION) + 1 if ATTENTION in value else len(value) + 1}

    def to_hf(self, value: tuple[str, ...], config: Any) -> Mapping[str, object]:
        """Return the kind of each layer, and the interval."""
        return {"layer_types": list(value), **self.to_gguf(value)}


class RotaryBase:
    """The setting of the base of rotary frequencies."""

    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        """Return the base."""
        if naming == "gguf":
            s.counts("rope.dimension_sections", len(SECTIONS))
            return s.number("rope.freq_base", 10_000.0)
        theta, nested = s.number("rope_theta", 10_000.0), s.mapping("rope_parameters") or s.mapping("rope_scaling")
        if nested is None:
            return theta
        nested.choice("rope_type", nested.choice("type", "default", "mrope"), "default", "mrope")
        found = nested.number("rope_theta", theta)
        nested.refuse_rest(("partial_rotary_factor", *MROPE))
        s.expect("rope_theta", found)
        return found

    def to_gguf(self, value: float) -> Mapping[str, object]:
        """Return the keys of the base and of the sections, which llama.cpp requires."""
        return {"rope.freq_base": value, "rope.dimension_sections": SECTIONS}

    def to_hf(self, value: float, config: Any) -> Mapping[str, object]:
        """Return the key."""
        return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


class RotaryDim:
    """The setting of how many elements of a head are rotated; config.json has their share."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the number, which is even."""
        if naming == "gguf":
            found = s.whole("rope.dimension_count", int(known.head_dim) // 4)
        else:
            nested, share = (
                s.mapping("rope_parameters") or s.mapping("rope_scaling"),
                s.number("partial_rotary_factor", 0.25),
            )
            found = int(known.head_dim * (share if nested is None else nested.number("partial_rotary_factor", share)))
        if found < 2 or found % 2 or found > known.head_dim:
            raise s.error("partial_rotary_factor", f"an even part of {known.head_dim} elements", found)
        return int(found)

    def to_gguf(self, value: int) -> Mapping[str, object]:
        """Return the key."""
        return {"rope.dimension_count": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        """Return the key."""
        return {"rope_parameters": {"partial_rotary_factor": value / config.head_dim}}


class ValueDim:
    """The setting of the width of a value head; GGUF files have that of all heads together."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the width."""
        if naming == "hf":
            return s.whole("linear_value_head_dim", 128)
        inner = s.whole("ssm.inner_size")
        if inner % known.n_value_heads:
            raise s.error("ssm.inner_size", f"a multiple of {known.n_value_heads}", inner)
        return int(inner // known.n_value_heads)

    def to_gguf(self, value: int) -> Mapping[str, object]:
        """Return no key: `Config.to_gguf` adds it."""
        return {}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        """Return the key."""
        return {"linear_value_head_dim": value}
