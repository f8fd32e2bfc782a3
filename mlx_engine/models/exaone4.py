"""EXAONE 4.0, dense and with a mixture of experts.

Paper: "EXAONE 4.0", arXiv 2507.11407. Reference: Hugging Face transformers, models/exaone4. Differences from Llama: the
outputs of attention and FFN are normed, not their inputs; heads of queries and keys are normed; in models with a
sliding window, every fourth layer attends to all tokens and has no rotary embedding, and the other layers (local
layers) have the window.

Reference of the mixtures: models/exaone_moe. Differences from the dense models: the inputs of attention and FFN are
normed, not their outputs; the router chooses experts by `sigmoid(logits) + bias`, only from the best groups of experts;
the output of a shared expert is added without a gate; the first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, declared, number, whole, whole_or_zero
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.models import deepseek, ernie4_5, glm4_moe, llama, olmo2, qwen3, standard
from mlx_engine.weights.experts import Count, Names
from mlx_engine.weights.model import Architecture


@dataclass(frozen=True)
class Config(llama.Config):
    only_local_rope: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=EVERY_RULE)
    # In local layers, tokens attend to the last `window` tokens. If `window` is 0, no layer is local.
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 0))
    is_local: tuple[bool, ...] = layer_kinds(4, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={"hidden_act": "silu", **llama.NO_BIAS, "sliding_window_pattern": (4, "LLLG", 0, None)},
    )


TENSORS = {**olmo2.TENSORS, **{name: row for name, row in qwen3.TENSORS.items() if row.shape == "E"}}
Model = standard.Model
plan = standard.plan(Config, TENSORS)


@dataclass(frozen=True)
class MoeConfig(glm4_moe.Sigmoids, Config):
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 4096))
    n_experts: int = declared(Count())
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1024))
    n_shared: int = whole(("expert_shared_count", 1), ("num_shared_experts", 1))
    n_dense: int = declared(deepseek.DenseLayers(1))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("routed_scaling_factor", 2.5))

    expected = Expected(
        gguf={
            "attention.causal": True, "expert_gating_func": 2,
            "expert_shared_feed_forward_length": ernie4_5.shared_size,
        },
        hf={**Config.expected.hf, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        # `is_moe_layer` repeats `mlp_layer_types`.
        harmless=("output_router_logits", "router_aux_loss_coef", "is_moe_layer"),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        return {**super().to_gguf(), "expert_shared_feed_forward_length": self.n_shared * self.expert_size}


MOE_TENSORS = llama.dense_first(qwen3.TENSORS)
NAMES = Names(bias="e_score_correction_bias", shared="shared_experts")
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, experts_of=NAMES)
ARCHITECTURES = (
    Architecture("EXAONE 4.0", ("exaone4",), "exaone4", Config, Model, plan),
    Architecture(
        "EXAONE with a mixture of experts, such as K-EXAONE-236B-A23B",
        ("exaone_moe", "exaone-moe"), "exaone-moe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
