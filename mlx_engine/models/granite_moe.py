"""Granite 3 with a mixture of experts, such as Granite-3.1-3B-A800M.

Reference: Hugging Face transformers, models/granitemoe. Difference from Granite 3: every FFN is a mixture of experts.
Folders have the experts of a layer as one tensor, gate and up first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, declared, whole
from mlx_engine.models import granite, llama, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all

ARCHITECTURES = ("granitemoe",)
GGUF_ARCHITECTURE = "granitemoe"


@dataclass(frozen=True)
class Config(Routed, granite.Config):
    """Granite's settings and the numbers of experts; `intermediate_size` is that of one expert."""

    normalize: ClassVar[bool] = True
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.finetuned": True},
        hf={"hidden_act": "silu"},
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {name: row for name, row in llama.TENSORS.items() if row.shape not in ("F D", "D F")} | llama.PERMUTED
NAMES = Names(
    "block_sparse_moe", router="router.layer", is_fused=True, fused=("input_linear.weight", "output_linear.weight")
)
Model = granite.Model
plan = standard.plan(Config, TENSORS, experts_of=NAMES)
