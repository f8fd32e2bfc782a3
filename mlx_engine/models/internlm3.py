"""InternLM3.

Reference: Hugging Face transformers, models/internlm3. The layers are Llama's; settings have other names. GGUF files
have the architecture "llama".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_engine.config.declared import Expected, halves, per_head, said, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard

ARCHITECTURES = ("internlm3",)
GGUF_ARCHITECTURE = "llama"


def equal_biases(s: Settings, key: str, config: Any) -> None:
    """Check that both settings of biases agree: transformers and GGUF files know one for attention."""
    if config.mlp_bias != config.attention_bias:
        raise s.error("bias", f"{config.attention_bias}, as qkv_bias", config.mlp_bias)


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes."""

    head_dim: int = whole(
        ("attention.key_length", per_head), ("head_dim", lambda known: 128),
        repeated=("attention.value_length", "rope.dimension_count"), condition=halves,
    )  # fmt: skip
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    attention_bias: bool = said(("qkv_bias", False))
    mlp_bias: bool = said(("bias", False))

    expected = Expected(gguf=llama.Config.expected.gguf, hf={"hidden_act": "silu", "bias": equal_biases})


Model = standard.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"})
