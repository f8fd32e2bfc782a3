"""Helium 1.

Reference: Hugging Face transformers, models/helium. Difference from Llama: in folders, rotary pairs are the rows
(2j, 2j + 1), as in GGUF files. The architecture of Helium's GGUF files is "llama".
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, number, partly_rotated_heads
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("helium",)
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = partly_rotated_heads(128)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-8))
    rope: Rotation = rotation(theta=100_000.0, rules=("linear", "dynamic", "yarn"))

    expected = Expected(hf={"hidden_act": "silu"})


# The output projection of attention has no bias, even if `attention_bias` is true.
TENSORS = {name: row for name, row in llama.TENSORS.items() if name != "blk.*.attn_output.bias"}
Model = standard.Model
plan = standard.plan(Config, TENSORS | llama.INTERLEAVED)
