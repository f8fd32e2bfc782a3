"""SmolLM3.

Reference: Hugging Face transformers, models/smollm3. Difference from Llama: every fourth layer has no rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Layer, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Naming, declared, each_layer
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama
from mlx_engine.models.decoder import Decoder
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import parts

ARCHITECTURES = ("smollm3",)
GGUF_ARCHITECTURE = "smollm3"


class RotatedLayers:
    """The setting of which layers have rotary embedding: config.json's list of 1 and 0, or all but every n-th."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        """Return for each layer whether it has rotary embedding."""
        if naming == "gguf":
            return self._all_but_every(4, known)
        interval = s.whole("no_rope_layer_interval", 4)
        return s.flags("no_rope_layers", known.n_layers) or self._all_but_every(interval, known)

    def _all_but_every(self, n: int, known: Any) -> tuple[bool, ...]:
        return tuple((i + 1) % n != 0 for i in range(known.n_layers))

    def to_gguf(self, value: tuple[bool, ...]) -> Mapping[str, object]:
        """Return no key: llama.cpp knows only models without rotary embedding in every fourth layer."""
        return {}

    def to_hf(self, value: tuple[bool, ...], config: Any) -> Mapping[str, object]:
        """Return 1 for each layer with rotary embedding, 0 for the others."""
        return {"no_rope_layers": [int(has_rope) for has_rope in value]}


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, and which layers have rotary embedding."""

    rope: Rotation = rotation(theta=2e6, rules=("linear", "dynamic", "yarn"))
    has_rope: tuple[bool, ...] = declared(RotatedLayers())

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "layer_types": each_layer("full_attention"),
        },
        harmless=("sliding_window", "max_window_layers", "pretraining_tp"),
    )


class Model(Decoder):
    """A Llama model with rotary embedding in some layers only."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = config.rope.for_heads(config.head_dim), config.norm_eps
        scores = Scores(config.head_dim**-0.5)
        layers = [
            Layer(**parts(parameters, i, eps), rope=rope if has_rope else None, scores=scores, activation="silu")
            for i, has_rope in enumerate(config.has_rope)
        ]
        output_norm = parameters.rms_norm("output_norm", eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    return llama.plan(checkpoint, Config, tied=True)
