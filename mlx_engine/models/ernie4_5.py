"""ERNIE 4.5, dense.

Reference: Hugging Face transformers, models/ernie4_5. Differences from Llama: rotary pairs are neighboring rows in all
files; one setting gives all linear layers biases.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, partly_rotated_heads, said
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("ernie4_5",)
GGUF_ARCHITECTURE = "ernie4_5"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes."""

    head_dim: int = partly_rotated_heads(lambda known: 128)
    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"))
    attention_bias: bool = said(("use_bias", False))
    mlp_bias: bool = said(("use_bias", False))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu"})


Model = standard.Model
plan = standard.plan(Config, {**llama.TENSORS, **llama.INTERLEAVED}, tied=True)
