"""EXAONE with a mixture of experts, such as K-EXAONE-236B-A23B.

Reference: Hugging Face transformers, models/exaone_moe. Differences from EXAONE 4: the inputs of attention and FFN are
normed, not their outputs; experts are chosen by the sigmoids of the router's logits plus a bias, in groups; a shared
expert without a weight; the first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.config.declared import Expected, Key, declared, number, whole
from mlx_engine.config.settings import Settings
from mlx_engine.models import deepseek, ernie4_5_moe, exaone4, glm4_moe, qwen3, standard
from mlx_engine.weights.experts import Count, Names

ARCHITECTURES = ("exaone_moe", "exaone-moe")
GGUF_ARCHITECTURE = "exaone-moe"


@dataclass(frozen=True)
class Config(glm4_moe.Sigmoids, exaone4.Config):
    """EXAONE's sizes, the numbers of experts, and how they are chosen."""

    window: int = declared(Key(Settings.whole_or_zero, ("attention.sliding_window", 0), ("sliding_window", 4096)))
    n_experts: int = declared(Count())
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1024))
    n_shared: int = whole(("expert_shared_count", 1), ("num_shared_experts", 1))
    n_dense: int = declared(deepseek.DenseLayers(1))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("routed_scaling_factor", 2.5))

    expected = Expected(
        gguf={
            "attention.causal": True, "expert_gating_func": 2,
            "expert_shared_feed_forward_length": ernie4_5_moe.shared_size,
        },
        hf={**exaone4.Config.expected.hf, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        # `is_moe_layer` repeats `mlp_layer_types`.
        harmless=("output_router_logits", "router_aux_loss_coef", "is_moe_layer"),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys, with the size of the shared expert."""
        return {**super().to_gguf(), "expert_shared_feed_forward_length": self.n_shared * self.expert_size}


TENSORS = {
    name: replace(row, kind="dense") if row.shape in ("F D", "D F") else row for name, row in qwen3.TENSORS.items()
}
NAMES = Names(bias="e_score_correction_bias", shared="shared_experts")
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=NAMES)
