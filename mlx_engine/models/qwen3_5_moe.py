"""Qwen3.5 and Qwen3.6 with a mixture of experts, such as Qwen3.6-35B-A3B, the text model.

Reference: Hugging Face transformers, models/qwen3_5_moe. Difference from Qwen3.5: every FFN is a mixture of experts, of
which each token uses a few, and an expert that all tokens share, as in Qwen2-MoE. The weights of a token's experts add
up to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.backends.experts import Routing
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, declared, whole
from mlx_engine.config.settings import Settings
from mlx_engine.models import qwen3_5
from mlx_engine.models.layer import LayerTensors, Mixture
from mlx_engine.models.qwen3_5 import STEMS
from mlx_engine.weights.experts import (
    Count,
    Names,
    expert_tensors,
    experts,
    of_all,
    shared_tensors,
    with_experts,
    with_shared_expert,
)
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.table import stem_of

ARCHITECTURES = ("qwen35moe", "qwen3_5_moe", "qwen3_5_moe_text")
GGUF_ARCHITECTURE = "qwen35moe"


def _of_dense_layers(s: Settings, key: str, config: object) -> None:
    """Accept the FFN size of dense layers, of which there are none."""
    s.whole_or_zero(key)


@dataclass(frozen=True)
class Config(qwen3_5.Config):
    """The sizes of a Qwen3.5 model with experts; `intermediate_size` is that of one expert."""

    intermediate_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    shared_size: int = whole("expert_shared_feed_forward_length", "shared_expert_intermediate_size")

    expected = Expected(
        gguf={**qwen3_5.Config.expected.gguf, "feed_forward_length": _of_dense_layers},
        hf={
            **qwen3_5.Config.expected.hf,
            "decoder_sparse_step": 1,
            "intermediate_size": _of_dense_layers,
            "norm_topk_prob": True,
        },
        harmless=(*qwen3_5.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


class Model(qwen3_5.Model):
    """A Qwen3.5 model whose FFNs are mixtures of experts with a shared expert."""

    @staticmethod
    def ffn(config: Config, t: LayerTensors) -> Mixture:
        """Return the experts of a layer."""
        routing = Routing(config.n_experts_used, normalize=True)
        return Mixture(t.norm("ffn_norm"), experts(t.p, t.i, config.n_experts, routing))


NAMES = Names(is_fused=True)


def of_extra(cfg: Config, checkpoint: Checkpoint, block: str) -> list[Tensor]:
    """Return the tensors of the experts of the layer of multi-token prediction; `block` is its module in a folder."""
    i = cfg.n_layers
    made = expert_tensors(cfg, checkpoint, NAMES, cfg.intermediate_size, i, [block])
    return [*made, *shared_tensors(cfg.hidden_size, cfg.shared_size, i, f"{block}.{NAMES.shared}")]


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    made, names = qwen3_5.plan(checkpoint, Config, experts=of_extra), replace(NAMES, stem=stem_of(checkpoint, STEMS))
    made = with_experts(made, checkpoint, names, made.config.intermediate_size)
    return with_shared_expert(made, names, made.config.shared_size)
