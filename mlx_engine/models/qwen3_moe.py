"""Qwen3 with a mixture of experts, such as Qwen3-30B-A3B.

Paper: "Qwen3 Technical Report", arXiv 2505.09388. Reference: Hugging Face transformers, models/qwen3_moe.
Difference from Qwen3: every FFN is a mixture of experts, of which each token uses a few.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, declared, whole
from mlx_engine.models import qwen3, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all

ARCHITECTURES = ("qwen3_moe", "qwen3moe")
GGUF_ARCHITECTURE = "qwen3moe"


@dataclass(frozen=True)
class Config(Routed, qwen3.Config):
    """The settings of a Qwen3-MoE model; `intermediate_size` is that of dense layers, of which there are none."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    normalize: bool = declared(Normalize(in_gguf=True))

    expected = Expected(
        gguf={key: value for key, value in qwen3.Config.expected.gguf.items() if key != "expert_count"},
        # Qwen3-Coder has the last three keys; transformers reads none of them.
        hf={
            **qwen3.Config.expected.hf,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "mlp_only_layers": ([], None),
            "qkv_bias": False,
            "use_qk_norm": True,
            "shared_expert_intermediate_size": (0, None),
        },
        harmless=(*qwen3.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {name: row for name, row in qwen3.TENSORS.items() if row.shape not in ("F D", "D F")}
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=Names())
