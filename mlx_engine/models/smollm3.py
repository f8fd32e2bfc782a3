"""SmolLM3.

Reference: Hugging Face transformers, models/smollm3. Difference from Llama: every fourth layer has no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, each_layer
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("smollm3",)
GGUF_ARCHITECTURE = "smollm3"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's settings, and `has_rope`: for each layer, whether it has rotary embedding."""

    rope: Rotation = rotation(theta=2e6, rules=("linear", "dynamic", "yarn"))
    # In the list `no_rope_layers`, 1 means that a layer has rotary embedding, and 0 that it has none. GGUF has no such
    # key: llama.cpp assumes that every fourth layer has no rotary embedding.
    has_rope: tuple[bool, ...] = layer_kinds(
        4, None, interval={"hf": "no_rope_layer_interval"}, flags={"hf": "no_rope_layers"}
    )

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu",
            "use_sliding_window": False,
            "layer_types": each_layer("full_attention"),
        },
        harmless=("sliding_window", "max_window_layers"),
    )


Model = standard.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED, tied=True)
