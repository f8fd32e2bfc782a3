"""Mixtral: Mistral with a mixture of experts.

Paper: "Mixtral of Experts", arXiv 2401.04088. Reference: Hugging Face transformers, models/mixtral.
Difference from Mistral: every FFN is a mixture of experts. GGUF files have the architecture "llama" and a number of
experts (`weights/model.py` tells them apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, declared, whole, whole_or_none
from mlx_engine.models import llama, mistral
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Layer, LayerTensors, Mixture
from mlx_engine.weights.experts import Count, Names, experts, of_all, with_experts
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan

ARCHITECTURES = ("mixtral",)
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class Config(mistral.Config):
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


class Model(Decoder):
    """A Mistral model whose FFNs are mixtures of experts.

    In addition to Mistral's settings its config has n_experts, n_experts_used, and `normalize`: whether the weights
    of a token's experts add up to 1.
    """

    def __init__(self, config: Any, parameters: Parameters, backend: Backend) -> None:
        rope, eps = config.rope.for_heads(config.head_dim), config.norm_eps
        routing = Routing(config.n_experts_used, config.normalize)
        layers = [
            Layer(
                norm=t.norm("attn_norm"), mix=Attention.read(t, config, rope, window=window),
                out=t.linear("attn_output"),
                ffn=Mixture(t.norm("ffn_norm"), experts(parameters, t.i, config.n_experts, routing)),
            )
            for t, window in zip(LayerTensors.of(parameters, config.n_layers, eps), config.windows, strict=True)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    made = llama.plan(checkpoint, Config, {**TENSORS, **llama.PERMUTED})
    return with_experts(made, checkpoint, NAMES, made.config.intermediate_size)
