"""dots.llm1.

Paper: "dots.llm1 Technical Report", arXiv 2506.05767. Reference: Hugging Face transformers, models/dots1. Differences
from Qwen3-MoE: the router chooses experts by `sigmoid(logits) + bias`, only from the best groups of experts; the output
of the shared experts is added without a gate; the first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, each_layer, flag, number, whole, whole_or_zero
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import glm4_moe, llama, qwen3, standard
from mlx_engine.weights.experts import of_all

ARCHITECTURES = ("dots1",)
GGUF_ARCHITECTURE = "dots1"


def without_windows(s: Settings, key: str, config: llama.Config) -> None:
    """Raise an error if a layer has a window.

    If `sliding_window` is not null, each layer whose index is at least `max_window_layers` has a window.
    """
    first = s.whole_or_zero(key, 62)
    if s.whole_or_none("sliding_window", 4096) is not None and first < config.n_layers:
        raise s.error(key, f"at least {config.n_layers}, the number of layers", first)


@dataclass(frozen=True)
class Config(glm4_moe.Sigmoids, llama.Config):
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    n_shared: int = whole(("expert_shared_count", 1), "n_shared_experts")
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("first_k_dense_replace", 0))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("routed_scaling_factor", 1.0))
    normalize: bool = flag(("expert_weights_norm", False), ("norm_topk_prob", False))

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "layer_types": each_layer("full_attention"),
            "max_window_layers": without_windows, "scoring_func": ("noaux_tc", "sigmoid"), "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        # transformers does not read `use_sliding_window`.
        harmless=("sliding_window", "use_sliding_window", "output_router_logits", "router_aux_loss_coef"),
    )  # fmt: skip


TENSORS = llama.dense_first(qwen3.TENSORS)
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=glm4_moe.NAMES)
