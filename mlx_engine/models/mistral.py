"""Mistral 7B and related dense models; Mixtral.

Paper: "Mistral 7B", arXiv 2310.06825. Reference: Hugging Face transformers, models/mistral. Difference from Llama: some
releases have sliding-window attention. GGUF files have the architecture "llama".

Paper of Mixtral: "Mixtral of Experts", arXiv 2401.04088. Reference: models/mixtral. Difference from Mistral: every FFN
is a mixture of experts. GGUF files also have the architecture "llama"; `weights/model.py` recognises Mixtral by the
number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, declared, whole, whole_or_none
from mlx_engine.models import llama, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.model import Architecture


@dataclass(frozen=True)
class Config(llama.Config):
    window: int | None = whole_or_none(None, ("sliding_window", 4096))

    expected = Expected(
        gguf=llama.Config.expected.gguf,
        hf={"hidden_act": "silu", **llama.NO_BIAS},
        harmless=("max_sequence_length",),
    )


Model = standard.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED)


@dataclass(frozen=True)
class MixtralConfig(Routed, Config):
    """Mistral's settings and those of the experts; `intermediate_size` is the FFN size of one expert."""

    window: int | None = whole_or_none(None, ("sliding_window", None))
    normalize: ClassVar[bool] = True
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)

    expected = Expected(
        gguf={key: value for key, value in llama.Config.expected.gguf.items() if not key.startswith("expert_")},
        hf=Config.expected.hf,
        harmless=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )


MIXTRAL_TENSORS = {name: row for name, row in llama.TENSORS.items() if row.shape not in ("F D", "D F")}
NAMES = Names("block_sparse_moe", ("w1", "w3", "w2"))
mixtral_plan = standard.plan(MixtralConfig, MIXTRAL_TENSORS | llama.PERMUTED, experts_of=NAMES)
ARCHITECTURES = (
    Architecture("Mistral 7B and related dense models", ("mistral",), "llama", Config, Model, plan),
    Architecture(
        "Mixtral: Mistral with a mixture of experts",
        ("mixtral",), "llama", MixtralConfig, Model, mixtral_plan,
    ),
)  # fmt: skip
