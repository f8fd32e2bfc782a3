"""Qwen1.5-MoE and Qwen2 with a mixture of experts, such as Qwen2-57B-A14B.

Paper: "Qwen2 Technical Report", arXiv 2407.10671. Reference: Hugging Face transformers, models/qwen2_moe.
Differences from Qwen2: every FFN is a mixture of experts, of which each token uses a few, and an expert that all tokens
share. The weights of a token's experts are not normalised; that of the shared expert is a sigmoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import ExpertLayer, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import qwen2
from mlx_engine.models.config import Expected, Naming, declared, whole
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.experts import Count, Names, experts, of_all, with_experts, with_shared_expert
from mlx_engine.models.parameters import Parameters
from mlx_engine.models.plan import Plan
from mlx_engine.models.settings import Settings
from mlx_engine.models.table import decoder_plan, parts

ARCHITECTURES = ("qwen2_moe", "qwen2moe")
GGUF_ARCHITECTURE = "qwen2moe"


class _Normalize:
    """Whether the weights of a token's experts add up to 1. GGUF has no key for it: llama.cpp never normalises."""

    def read(self, s: Settings, naming: Naming, known: Any) -> bool:
        return False if naming == "gguf" else s.flag("norm_topk_prob", False)

    def to_gguf(self, value: bool) -> Mapping[str, object]:
        return {}


@dataclass(frozen=True)
class Config(qwen2.Config):
    """The settings of a Qwen2-MoE model; `intermediate_size` is that of dense layers, of which there are none."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    shared_size: int = whole("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
    normalize: bool = declared(_Normalize())

    expected = Expected(
        gguf={key: value for key, value in qwen2.Config.expected.gguf.items() if key != "expert_count"},
        hf={**qwen2.Config.expected.hf, "decoder_sparse_step": 1, "mlp_only_layers": ([], None)},
        harmless=(*qwen2.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {name: row for name, row in qwen2.TENSORS.items() if row.shape not in ("F D", "D F")}


class Model(Decoder):
    """A Qwen2 model whose FFNs are mixtures of experts with a shared expert."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = config.rope.for_heads(config.head_dim), config.norm_eps
        routing = Routing(config.n_experts_used, config.normalize)
        scores = Scores(config.head_dim**-0.5)
        layers = [
            ExpertLayer(
                **parts(parameters, i, eps), rope=rope, scores=scores,
                experts=experts(parameters, i, config.n_experts, routing),
            )
            for i in range(config.n_layers)
        ]  # fmt: skip
        output_norm = parameters.rms_norm("output_norm", eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    made = decoder_plan(checkpoint, Config, TENSORS)
    made = with_experts(made, checkpoint, Names(), made.config.expert_size)
    return with_shared_expert(made, made.config.shared_size)
