"""Command R and Aya 23.

Reference: Hugging Face transformers, models/cohere. Differences from Llama: attention and FFN read the same normed
hidden states (a parallel block); layer norms without a bias; rotary pairs are neighboring rows; logits have a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, number
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("cohere", "command-r")
GGUF_ARCHITECTURE = "command-r"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes; logits are multiplied by a factor."""

    layer_norms: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=500_000.0)
    logit_scale: float = number("logit_scale", ("logit_scale", 0.0625))

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none"},
        # Command R+ norms each head with its own weights.
        hf={"hidden_act": "silu", "mlp_bias": False, "use_qk_norm": False},
        # transformers reads `max_position_embeddings` alone.
        harmless=("model_max_length",),
    )


TENSORS = {**{name: row for name, row in llama.TENSORS.items() if "ffn_norm" not in name}, **llama.INTERLEAVED}
Model = standard.Model
plan = standard.plan(Config, TENSORS, tied=True)
