"""MiniCPM 1B and 2B, and MiniCPM4.

Paper: "MiniCPM", arXiv 2404.06395. Reference: llama.cpp, models/minicpm. The layers are Granite's; attention scores are
scaled by `head_dim**-0.5`. The residual multiplier and the divisor of the logits are computed from `scale_depth` and
`dim_model_base` in config.json (`Multiplier`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.config.declared import Expected, Naming, Setting, constant, declared, number
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import granite, llama, standard

ARCHITECTURES = ("minicpm",)
GGUF_ARCHITECTURE = "minicpm"


@dataclass(frozen=True)
class Multiplier(Setting):
    """The setting of a multiplier or divisor.

    GGUF files have its value. config.json has a number, and the value is `number / size` or `size / number`, where the
    size follows from other settings.

    Attributes:
        gguf: the GGUF key of the value.
        hf: the key of the number in config.json. The default of the number is 1.
        size: a function that returns the size, given a config.
        power: 1 for `number / size`, -1 for `size / number`.
    """

    gguf: str
    hf: str
    size: Callable[[Any], float]
    power: int = 1

    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        if naming == "gguf":
            return s.number(self.gguf)
        return float((s.number(self.hf, 1.0) / self.size(known)) ** self.power)

    def to_gguf(self, value: float) -> Mapping[str, object]:
        return {self.gguf: value}

    def to_hf(self, value: float, config: Any) -> Mapping[str, object]:
        return {self.hf: value**self.power * self.size(config)}


@dataclass(frozen=True)
class Config(granite.Config):
    rope: Rotation = rotation(rules=("linear", "dynamic", "longrope"))
    attention_multiplier: float = constant(lambda known: known.head_dim**-0.5)
    embedding_multiplier: float = number("embedding_scale", ("scale_emb", 1.0))
    residual_multiplier: float = declared(Multiplier("residual_scale", "scale_depth", lambda of: of.n_layers**0.5))
    logits_divisor: float = declared(Multiplier("logit_scale", "dim_model_base", lambda of: of.hidden_size, -1))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", **llama.NO_BIAS})


Model = granite.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED, tied=True)
