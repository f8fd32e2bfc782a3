"""Hunyuan, dense: Hunyuan 0.5B to 7B.

Reference: Hugging Face transformers, models/hunyuan_v1_dense. Differences from Llama: heads of queries and keys are
normed after their rotation; a larger base of the rotary frequencies for long contexts, `alpha`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, number, partly_rotated_heads
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("hunyuan_v1_dense", "hunyuan-dense")
GGUF_ARCHITECTURE = "hunyuan-dense"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes."""

    norms_after_rope: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"), alpha=True)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "use_qk_norm": True, "use_cla": False, "norm_type": "rms",
            "add_classification_head": False, "num_experts": (1, None),
        },
        harmless=("attention_head_dim", "cla_share_factor", "eod_token_id", "org_vocab_size"),
    )  # fmt: skip


TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_q_norm.weight": Row("model.layers.*.self_attn.query_layernorm.weight", "E"),
    "blk.*.attn_k_norm.weight": Row("model.layers.*.self_attn.key_layernorm.weight", "E"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
