"""The first DeepSeek with a mixture of experts, DeepSeek-MoE-16B.

Paper: "DeepSeekMoE", arXiv 2401.06066. transformers has no class for this model. Attention is Llama's. The router
chooses the experts with the largest softmax probabilities. The output of the shared experts is added without a gate.
The first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, declared, whole, whole_or_zero
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all

ARCHITECTURES = ("deepseek",)
GGUF_ARCHITECTURE = "deepseek"


@dataclass(frozen=True)
class Config(Routed, llama.Config):
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    n_experts: int = declared(Count("n_routed_experts"))
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1407))
    n_shared: int = whole("expert_shared_count", "n_shared_experts")
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("first_k_dense_replace", 0))
    normalize: bool = declared(Normalize(in_gguf=False))

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 1, "expert_weights_scale": 1.0},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "moe_layer_freq": 1, "scoring_func": "softmax",
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": (1, None), "topk_group": (1, None),
        },
        harmless=("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        # llama.cpp requires this key.
        return {**super().to_gguf(), "expert_weights_scale": 1.0}


TENSORS = llama.dense_first(llama.TENSORS | llama.PERMUTED)
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=Names(shared="shared_experts"))
