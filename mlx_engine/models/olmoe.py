"""OLMoE.

Paper: "OLMoE: Open Mixture-of-Experts Language Models", arXiv 2409.02060. Reference: Hugging Face transformers,
models/olmoe. Differences from Qwen3-MoE: queries and keys are normed over all heads together, not per head; the
router's top-k weights are not renormalised by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, declared, number, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, olmo2, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all

ARCHITECTURES = ("olmoe",)
GGUF_ARCHITECTURE = "olmoe"


@dataclass(frozen=True)
class Config(Routed, llama.Config):
    """Llama's settings and those of the experts; `intermediate_size` is the FFN size of one expert."""

    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 8), condition=of_all)
    normalize: bool = declared(Normalize(in_gguf=False))

    expected = Expected(
        gguf={"attention.causal": True},
        hf={"hidden_act": "silu", **llama.NO_BIAS, "clip_qkv": None},
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )


ROW_NORMS = {name: row for name, row in olmo2.TENSORS.items() if row.shape in ("HE", "GE") and "norm" in name}
DENSE = ("F D", "D F")
TENSORS = {name: row for name, row in llama.TENSORS.items() if row.shape not in DENSE} | ROW_NORMS
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=Names())
