"""Granite 3, dense and with a mixture of experts.

Reference: Hugging Face transformers, models/granite. Differences from Llama: the embeddings, the attention scores, and
the outputs of attention and FFN are each multiplied by a setting; the logits are divided by a setting.

Reference of the mixtures: models/granitemoe. Every FFN is a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Rope, Scores, Token
from mlx_engine.config.declared import Expected, declared, number, whole
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.parameters import Parameters


@dataclass(frozen=True)
class Config(llama.Config):
    attention_multiplier: float = number(
        ("attention.scale", lambda known: known.head_dim**-0.5), ("attention_multiplier", 1.0)
    )
    embedding_multiplier: float = number(("embedding_scale", 1.0), ("embedding_multiplier", 1.0))
    residual_multiplier: float = number(("residual_scale", 1.0), ("residual_multiplier", 1.0))
    logits_divisor: float = number("logit_scale", ("logits_scaling", 1.0))

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": True},
        hf={"hidden_act": "silu"},
    )


class Model(Decoder):
    """A Llama model whose hidden states are divided by the residual multiplier m.

    So the outputs of attention and FFN are added without a multiplication. Norms give the same results, because their
    epsilon is divided by m**2. The weight of the last norm is divided by `logits_divisor`.
    """

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = standard.rope_of(parameters, config), config.norm_eps / config.residual_multiplier**2
        scores = Scores(config.attention_multiplier)
        layers = [
            Layer(
                norm=t.norm("attn_norm"),
                branches=(self.branch(config, t, rope, scores),),
                ffn=standard.feed_forward(t, config),
            )
            for t in LayerTensors.of(parameters, config.n_layers, eps)
        ]
        output_norm = parameters.rms_norm("output_norm", eps, times=1 / config.logits_divisor)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)

    def branch(self, config: Config, t: LayerTensors, rope: Rope | None, scores: Scores) -> Branch:
        return Branch(Attention.read(t, config, rope, scores), t.linear("attn_output"))

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        of = self.config
        return self.backend.scale(super().embed(ids, positions), of.embedding_multiplier / of.residual_multiplier)


plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED)


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    """Granite's settings and those of the experts; `intermediate_size` is the FFN size of one expert."""

    normalize: ClassVar[bool] = True
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.finetuned": True},
        hf={"hidden_act": "silu"},
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )


MOE_TENSORS = {name: row for name, row in llama.TENSORS.items() if row.shape not in ("F D", "D F")} | llama.PERMUTED
NAMES = Names(
    "block_sparse_moe", router="router.layer", is_fused=True, fused=("input_linear.weight", "output_linear.weight")
)
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, experts_of=NAMES)
ARCHITECTURES = (
    Architecture("Granite 3, dense", ("granite",), "granite", Config, Model, plan),
    Architecture(
        "Granite 3 with a mixture of experts, such as Granite-3.1-3B-A800M",
        ("granitemoe",), "granitemoe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
