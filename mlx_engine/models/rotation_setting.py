"""Read and write rotary embedding settings: their keys in GGUF, and in config.json of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.models.config import Naming, declared
from mlx_engine.models.rotation import Rotation
from mlx_engine.models.settings import Settings

# The kinds of layers with different rotary settings, as transformers 5 names them.
LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RotationSetting:
    """The setting that reads and writes a `Rotation`; the attributes are the arguments of `rotation`."""

    gguf: str
    hf: str
    theta: float
    rules: tuple[str, ...]
    layers: str | None
    always: bool

    def read(self, s: Settings, naming: Naming, known: Any) -> Rotation:
        """Return the rotary embedding settings."""
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
            # transformers 5 renamed the mapping; a file must not have both.
            if scaling is None:
                scaling = s.mapping("rope_scaling")
            else:
                s.expect("rope_scaling", None)
        if scaling is None:
            return Rotation(theta)
        found = self._scaled(scaling, scaling.number("rope_theta", theta))
        scaling.refuse_rest()
        # A base outside the mapping must equal the base in it.
        s.expect(self.hf, found.theta)
        return found

    def _scaled(self, s: Settings, theta: float) -> Rotation:
        kinds = ("default", *self.rules)
        # Older files name the key "type".
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
        """Return the keys of the base and of the "linear" rule; GGUF has no keys for "llama3"."""
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
        gguf: the GGUF key of the base.
        hf: the key of the base in config.json, if `rope_parameters` does not have it.
        theta: the default base.
        rules: the implemented rules besides "default"; if empty, `rope_scaling` is not read.
        layers: the kind of layers in `rope_parameters` that have this rotation, if kinds differ.
        always: whether to write the base to a GGUF file even if it is `theta`.
    """
    return declared(RotationSetting(gguf, hf, theta, rules, layers, always))
