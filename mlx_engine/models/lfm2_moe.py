"""LFM2 with a mixture of experts, such as LFM2-8B-A1B.

Reference: Hugging Face transformers, models/lfm2_moe. Difference from LFM2: the FFNs of all layers but the first are
mixtures of experts, which are chosen by the sigmoids of the router's logits plus a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlx_engine.backends.experts import Scoring
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, declared, whole
from mlx_engine.config.settings import Settings
from mlx_engine.models import lfm2
from mlx_engine.weights.experts import Count, Names, Routed, of_all, with_experts
from mlx_engine.weights.plan import Plan

ARCHITECTURES = ("lfm2_moe", "lfm2moe")
GGUF_ARCHITECTURE = "lfm2moe"


@dataclass(frozen=True)
class Config(Routed, lfm2.Config):
    """LFM2's sizes and the numbers of experts."""

    scoring: ClassVar[Scoring] = "sigmoid"
    sum_eps: ClassVar[float] = 1e-6
    normalize: ClassVar[bool] = True
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 7168))
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 4), condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1792))
    n_dense: int = declared(Key(Settings.whole_or_zero, ("leading_dense_block_count", 0), ("num_dense_layers", 2)))

    expected = Expected(
        gguf={**lfm2.Config.expected.gguf, "expert_gating_func": 2},
        hf={
            **lfm2.Config.expected.hf, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        },
        harmless=(*lfm2.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )  # fmt: skip


TENSORS = {
    name: replace(row, kind="dense") if row.shape in ("F D", "D F") else row for name, row in lfm2.TENSORS.items()
}
NAMES = Names("feed_forward", ("w1", "w3", "w2"), bias="expert_bias")
Model = lfm2.Model


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint."""
    made = lfm2.plan(checkpoint, Config, TENSORS)
    return with_experts(made, checkpoint, NAMES, made.config.expert_size)
