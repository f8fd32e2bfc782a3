"""Rotations as files describe them: GGUF, and config.json in the spelling of transformers 4 and in that of 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.parameters import Rope
from mlx_engine.models.config import Naming, declared
from mlx_engine.models.settings import Settings

# What transformers 5 calls the kinds of layers that rotate differently.
LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rotation:
    """How queries and keys are rotated.

    Attributes:
        theta: the base of the frequencies `theta ** (-2j / head_dim)`.
        rule: "default"; "linear", positions count as 1 / factor; or "llama3".
        factor: of the rule.
        low: of "llama3": what turns less often over the context of the training is slowed down by `factor`.
        high: of "llama3": what turns more often stays as it is.
        context: of "llama3": tokens of the training's context.
    """

    theta: float
    rule: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    context: int = 1

    def for_heads(self, head_dim: int) -> Rope:
        """Return the frequencies for heads of this width."""
        plain = Rope.plain(head_dim, self.theta)
        if self.rule == "llama3":
            return llama3(plain, factor=self.factor, low=self.low, high=self.high, context=self.context)
        return scaled(plain, self.factor)

    def divisors(self, head_dim: int) -> tuple[float, ...]:
        """Return by what the rule divides each frequency."""
        plain, rope = Rope.plain(head_dim, self.theta), self.for_heads(head_dim)
        return tuple(f / slow for f, slow in zip(plain.frequencies, rope.frequencies, strict=True))


@dataclass(frozen=True)
class RotationSetting:
    """How a `Rotation` is read and written; the attributes are the arguments of `rotation`."""

    gguf: str
    hf: str
    theta: float
    rules: tuple[str, ...]
    layers: str | None
    always: bool

    def read(self, s: Settings, naming: Naming, known: Any) -> Rotation:
        """Return the rotation."""
        if naming == "hf":
            return self._from_hf(s)
        theta = s.number(self.gguf, self.theta)
        if "linear" not in self.rules:
            return Rotation(theta)
        factor = s.number("rope.scaling.factor", 1.0)
        is_linear = s.choice("rope.scaling.type", "none", "linear") == "linear"
        return Rotation(theta, "linear", factor) if is_linear else Rotation(theta)

    def _from_hf(self, s: Settings) -> Rotation:
        theta, scaling = s.number(self.hf, self.theta), s.mapping("rope_parameters")
        if scaling is not None and self.layers is not None:
            outer, scaling = scaling, scaling.mapping(self.layers)
            outer.refuse_rest(LAYER_KINDS)
        if self.rules:
            # transformers 5 moved the mapping; it is never in both places.
            if scaling is None:
                scaling = s.mapping("rope_scaling")
            else:
                s.expect("rope_scaling", None)
        if scaling is None:
            return Rotation(theta)
        found = self._scaled(scaling, scaling.number("rope_theta", theta))
        scaling.refuse_rest()
        # A base beside the mapping, too, may not contradict it.
        s.expect(self.hf, found.theta)
        return found

    def _scaled(self, s: Settings, theta: float) -> Rotation:
        kinds = ("default", *self.rules)
        # The key had a shorter name once.
        rule = s.choice("rope_type", s.choice("type", *kinds), *kinds)
        if rule == "default":
            return Rotation(theta)
        factor = s.number("factor")
        if rule == "linear":
            return Rotation(theta, rule, factor)
        low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
        if high <= low:
            raise s.error("high_freq_factor", f"more than low_freq_factor, {low:g}", high)
        return Rotation(theta, rule, factor, low, high, s.whole("original_max_position_embeddings"))

    def to_gguf(self, value: Rotation) -> Mapping[str, object]:
        """Return the keys of the base and of the "linear" rule; GGUF has none for "llama3"."""
        keys: dict[str, object] = {self.gguf: value.theta} if self.always or value.theta != self.theta else {}
        if value.rule == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": value.factor}
        return keys


def rotation(
    *, gguf: str = "rope.freq_base", hf: str = "rope_theta", theta: float = 10_000.0, rules: tuple[str, ...] = (),
    layers: str | None = None, always: bool = True,
) -> Any:  # fmt: skip
    """Declare a field that is a `Rotation`.

    Args:
        gguf: the key of the base.
        hf: the key of the base in config.json, where `rope_parameters` does not say it.
        theta: the base that a file leaves out.
        rules: those that are implemented besides "default"; without any, `rope_scaling` is not read.
        layers: the kind of layers in `rope_parameters` that rotate so, where kinds differ.
        always: whether a GGUF file says the base even if it is `theta`.
    """
    return declared(RotationSetting(gguf, hf, theta, rules, layers, always))


def scaled(rope: Rope, factor: float) -> Rope:
    """Positions count as 1 / factor."""
    return Rope(tuple(f / factor for f in rope.frequencies))


def llama3(rope: Rope, *, factor: float, low: float, high: float, context: int) -> Rope:
    """What turns less than `low` times over the context of the training is slowed down by `factor`.

    What turns more than `high` times stays as it is, and between the two the change is gradual. Source: "The Llama 3
    Herd of Models", arXiv 2407.21783, and Hugging Face transformers, modeling_rope_utils.
    """

    def slowed(f: float) -> float:
        turns = context * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        return kept * f + (1 - kept) * f / factor

    return Rope(tuple(slowed(f) for f in rope.frequencies))
