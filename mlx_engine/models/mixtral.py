"""Mixtral: Mistral with a mixture of experts.

Paper: "Mixtral of Experts", arXiv 2401.04088. Reference: Hugging Face transformers, models/mixtral.
Difference from Mistral: every FFN is a mixture of experts. GGUF files have the architecture "llama" and a number of
experts (`weights/model.py` tells them apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, declared, whole, whole_or_none
from mlx_engine.models import llama, mistral, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all

ARCHITECTURES = ("mixtral",)
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class Config(Routed, mistral.Config):
    """Mistral's settings and the numbers of experts; `intermediate_size` is that of one expert."""

    window: int | None = whole_or_none(None, ("sliding_window", None))
    normalize: ClassVar[bool] = True
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)

    expected = Expected(
        gguf={key: value for key, value in llama.Config.expected.gguf.items() if not key.startswith("expert_")},
        hf=mistral.Config.expected.hf,
        harmless=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )


TENSORS = {name: row for name, row in llama.TENSORS.items() if row.shape not in ("F D", "D F")}
NAMES = Names("block_sparse_moe", ("w1", "w3", "w2"))
Model = standard.Model
plan = standard.plan(Config, TENSORS | llama.PERMUTED, experts_of=NAMES)
