"""Qwen3 with a mixture of experts, such as Qwen3-30B-A3B.

Paper: "Qwen3 Technical Report", arXiv 2505.09388. Reference: Hugging Face transformers, models/qwen3_moe.
Difference from Qwen3: every FFN is a mixture of experts, of which each token uses a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import ExpertLayer, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import qwen3
from mlx_engine.models.config import Expected, Naming, declared, whole
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.experts import Count, Names, experts, of_all, with_experts
from mlx_engine.models.parameters import Parameters
from mlx_engine.models.plan import Plan
from mlx_engine.models.settings import Settings
from mlx_engine.models.table import decoder_plan, parts

ARCHITECTURES = ("qwen3_moe", "qwen3moe")
GGUF_ARCHITECTURE = "qwen3moe"


class _Normalize:
    """Whether the weights of a token's experts add up to 1. GGUF has no key for it: llama.cpp always normalises."""

    def read(self, s: Settings, naming: Naming, known: Any) -> bool:
        return True if naming == "gguf" else s.flag("norm_topk_prob", False)

    def to_gguf(self, value: bool) -> Mapping[str, object]:
        return {}


@dataclass(frozen=True)
class Config(qwen3.Config):
    """The settings of a Qwen3-MoE model; `intermediate_size` is that of dense layers, of which there are none."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    normalize: bool = declared(_Normalize())

    expected = Expected(
        gguf={key: value for key, value in qwen3.Config.expected.gguf.items() if key != "expert_count"},
        # Qwen3-Coder has the last three keys; transformers reads none of them.
        hf={
            **qwen3.Config.expected.hf,
            "decoder_sparse_step": 1,
            "mlp_only_layers": ([], None),
            "qkv_bias": False,
            "use_qk_norm": True,
            "shared_expert_intermediate_size": (0, None),
        },
        harmless=(*qwen3.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {name: row for name, row in qwen3.TENSORS.items() if row.shape not in ("F D", "D F")}


class Model(Decoder):
    """A Qwen3 model whose FFNs are mixtures of experts."""

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
    return with_experts(made, checkpoint, Names(), made.config.expert_size)
