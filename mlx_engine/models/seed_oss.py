"""Seed-OSS 36B.

Reference: Hugging Face transformers, models/seed_oss. Differences from Llama: queries, keys and values have biases; the
head dim is a separate setting, not hidden_size / n_heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.config.declared import Expected, partly_rotated_heads, said
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("seed_oss",)
GGUF_ARCHITECTURE = "seed_oss"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's settings, and `attention_out_bias`: whether the output projection of attention has a bias."""

    head_dim: int = partly_rotated_heads(128)
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    attention_bias: bool = said(("attention_bias", True))
    attention_out_bias: bool = said(("attention_out_bias", False))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu"})


TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_output.bias": replace(llama.TENSORS["blk.*.attn_output.bias"], when="attention_out_bias"),
    "blk.*.ffn_norm.weight": replace(llama.TENSORS["blk.*.ffn_norm.weight"], gguf="blk.*.post_attention_norm.weight"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
