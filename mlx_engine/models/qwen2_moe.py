"""Qwen1.5-MoE and Qwen2 with a mixture of experts, such as Qwen2-57B-A14B.

Paper: "Qwen2 Technical Report", arXiv 2407.10671. Reference: Hugging Face transformers, models/qwen2_moe.
Differences from Qwen2: every FFN is a mixture of experts, of which each token uses a few, and an expert that all tokens
share. Router weights are not renormalised; the shared expert's output is scaled by a sigmoid gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, declared, whole
from mlx_engine.models import qwen2, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all, with_experts, with_shared_expert
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("qwen2_moe", "qwen2moe")
GGUF_ARCHITECTURE = "qwen2moe"


@dataclass(frozen=True)
class Config(Routed, qwen2.Config):
    """The settings of a Qwen2-MoE model. `intermediate_size` is read but unused: no layer is dense."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    shared_size: int = whole("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
    normalize: bool = declared(Normalize(in_gguf=False))

    expected = Expected(
        gguf={key: value for key, value in qwen2.Config.expected.gguf.items() if key != "expert_count"},
        hf={
            **qwen2.Config.expected.hf,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "mlp_only_layers": ([], None),
        },
        harmless=(*qwen2.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {name: row for name, row in qwen2.TENSORS.items() if row.shape not in ("F D", "D F")}


Model = standard.Model


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    made = decoder_plan(checkpoint, Config, TENSORS)
    made = with_experts(made, checkpoint, Names(), made.config.expert_size)
    return with_shared_expert(made, Names(), made.config.shared_size)
