"""GLM-4.5, 4.6 and 4.7 with a mixture of experts, such as GLM-4.5-Air; Solar Open.

Paper: "GLM-4.5", arXiv 2508.06471. Reference: Hugging Face transformers, models/glm4_moe. Differences from Qwen3-MoE:
the router chooses experts by `sigmoid(logits) + bias`, only from the best groups of experts; the output of a shared
expert is added without a gate; the first layers are dense; RoPE rotates half of each head; queries, keys and values
have biases; only some models norm query and key heads.

Reference of Solar Open: models/solar_open. Differences from GLM-4.5: no layer is dense; RoPE rotates whole heads; heads
are not normed. In GGUF files, both have the architecture `glm4moe`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlx_engine.backends.experts import Scoring
from mlx_engine.config.declared import (
    Expected,
    constant,
    declared,
    divides,
    flag,
    number,
    partly_rotated_heads,
    said,
    whole,
    whole_or_zero,
)
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, qwen3, standard
from mlx_engine.weights.experts import Count, InGroups, Names, of_all, of_groups
from mlx_engine.weights.model import Architecture


@dataclass(frozen=True)
class Sigmoids(InGroups):
    """The settings of a mixture of experts with DeepSeek-V3's router. The defaults are GLM-4.5's."""

    scoring: ClassVar[Scoring] = "sigmoid"
    n_experts: int = declared(Count("n_routed_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 8), condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1408))
    n_shared: int = whole(("expert_shared_count", 1), ("n_shared_experts", 1))
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("first_k_dense_replace", 1))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("routed_scaling_factor", 1.0))
    normalize: bool = flag(("expert_weights_norm", True), ("norm_topk_prob", True))
    n_groups: int = whole(("expert_group_count", 1), ("n_group", 1), condition=divides("n_experts"))
    n_groups_used: int = whole(("expert_group_used_count", 1), ("topk_group", 1), condition=of_groups)


@dataclass(frozen=True)
class Config(Sigmoids, llama.Config):
    head_dim: int = partly_rotated_heads(128)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"), partial=True, part=0.5)
    attention_bias: bool = said(("attention_bias", False))
    use_qk_norm: bool = said(("use_qk_norm", False))

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2},
        hf={"hidden_act": "silu", "mlp_bias": False},
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {
    **{name: row for name, row in llama.dense_first(llama.TENSORS).items() if name != "blk.*.attn_output.bias"},
    **{name: replace(row, when="use_qk_norm") for name, row in qwen3.TENSORS.items() if row.shape == "E"},
    **llama.PARTLY_ROTATED,
    "blk.*.ffn_norm.weight": replace(llama.TENSORS["blk.*.ffn_norm.weight"], gguf="blk.*.post_attention_norm.weight"),
}
NAMES = Names(bias="gate.e_score_correction_bias", shared="shared_experts")
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=NAMES)


@dataclass(frozen=True)
class SolarConfig(Config):
    # Unused, because no layer is dense.
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 10240))
    rope: Rotation = rotation(theta=1e6, rules=("linear", "dynamic", "yarn"), partial=True)
    use_qk_norm: bool = constant(False)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1280))
    n_dense: int = constant(0)

    expected = Expected(
        hf={**Config.expected.hf, "use_qk_norm": False, "first_k_dense_replace": 0},
        harmless=Config.expected.harmless,
    )


solar_plan = standard.plan(SolarConfig, TENSORS, experts_of=NAMES)
ARCHITECTURES = (
    Architecture(
        "GLM-4.5, 4.6 and 4.7 with a mixture of experts, such as GLM-4.5-Air",
        ("glm4_moe", "glm4moe"), "glm4moe", Config, Model, plan,
    ),
    Architecture("Solar Open, such as Solar-Open-100B", ("solar_open",), "glm4moe", SolarConfig, Model, solar_plan),
)  # fmt: skip
