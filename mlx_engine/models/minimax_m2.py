"""MiniMax-M2.

Reference: Hugging Face transformers, models/minimax_m2. Differences from Qwen3-MoE: the router chooses experts by
`sigmoid(logits) + bias`; queries and keys are normed over all heads together, not per head; RoPE rotates only a part of
each head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.experts import Scoring
from mlx_engine.config.declared import Expected, declared, partly_rotated_heads, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, olmoe, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all

ARCHITECTURES = ("minimax_m2", "minimax-m2")
GGUF_ARCHITECTURE = "minimax-m2"


def softmax_alone(s: Settings, key: str, config: Any) -> None:
    """Check that `attn_type_list`, if present, has 1 (softmax attention), not 0 (linear attention), for every layer."""
    kinds = s.flags(key, config.n_layers)
    if kinds is not None and not all(kinds):
        raise s.error(key, "1 for every layer", list(map(int, kinds)))


@dataclass(frozen=True)
class Config(Routed, llama.Config):
    """Llama's settings and those of the experts; `intermediate_size` is the FFN size of one expert."""

    scoring: ClassVar[Scoring] = "sigmoid"
    normalize: ClassVar[bool] = True
    intermediate_size: int = whole("expert_feed_forward_length", "intermediate_size", repeated=("feed_forward_length",))
    head_dim: int = partly_rotated_heads(128)
    rope: Rotation = rotation(theta=5e6, rules=("linear", "dynamic", "yarn"), partial=True)
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 8), condition=of_all)

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2},
        # transformers does not read `attn_type_list` and the keys after it.
        hf={
            "hidden_act": "silu", **llama.NO_BIAS, "attn_type_list": softmax_alone, "use_qk_norm": True,
            "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
            "shared_intermediate_size": 0, "layernorm_full_attention_beta": 1, "layernorm_linear_attention_beta": 1,
            "layernorm_mlp_beta": 1,
        },
        # The last two keys are about dense layers and shared experts, which these models do not have.
        harmless=(
            "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "mlp_intermediate_size",
            "shared_moe_mode",
        ),
    )  # fmt: skip


TENSORS = {
    **olmoe.TENSORS,
    "blk.*.attn_q.weight": replace(llama.TENSORS["blk.*.attn_q.weight"], rotated="H"),
    "blk.*.attn_k.weight": replace(llama.TENSORS["blk.*.attn_k.weight"], rotated="G"),
    "blk.*.attn_q_norm.weight": replace(olmoe.TENSORS["blk.*.attn_q_norm.weight"], rotated="H"),
    "blk.*.attn_k_norm.weight": replace(olmoe.TENSORS["blk.*.attn_k_norm.weight"], rotated="G"),
}
NAMES = Names("block_sparse_moe", ("w1", "w3", "w2"), bias="e_score_correction_bias")
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=NAMES)
