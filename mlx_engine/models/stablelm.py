"""StableLM 3B, StableLM 2 1.6B and Stable Code.

Reference: Hugging Face transformers, models/stablelm. Differences from Llama: layer norms with biases; RoPE rotates a
part of each head; queries, keys and values have biases if `use_qkv_bias` is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, number, partly_rotated_heads, said
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("stablelm",)
GGUF_ARCHITECTURE = "stablelm"


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"), partial=True, part=0.25)
    attention_bias: bool = said(("use_qkv_bias", False))

    expected = Expected(
        # Both values are accepted: if config.json does not have the key, llama.cpp's converter writes True, although
        # the blocks are sequential.
        gguf={"attention.causal": True, "use_parallel_residual": (True, False)},
        # StableLM 2 12B is refused: it has parallel blocks, and a norm with different weights for each head.
        hf={"hidden_act": "silu", "mlp_bias": False, "use_parallel_residual": False},
    )


TENSORS = {
    **{name: row for name, row in llama.TENSORS.items() if name != "blk.*.attn_output.bias"},
    **llama.NORM_BIASES,
    **llama.PARTLY_ROTATED,
}
Model = standard.Model
# In config.json of the first releases, two settings have other names.
plan = standard.plan(Config, TENSORS, aliases={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"})
