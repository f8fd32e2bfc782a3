"""ERNIE 4.5, dense and with a mixture of experts.

Reference: Hugging Face transformers, models/ernie4_5. Differences from Llama: rotary pairs are (2j, 2j + 1) in
folders, too, not only in GGUF files; one setting, `use_bias`, gives both attention and FFN biases.

Reference of the mixtures: models/ernie4_5_moe. To choose experts, the router adds a bias to the softmax of its logits.
The output of the shared experts is added without a gate. The first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_engine.config.declared import (
    Expected,
    constant,
    declared,
    number,
    partly_rotated_heads,
    said,
    whole,
    whole_or_zero,
)
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.model import Architecture


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = partly_rotated_heads(128)
    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"))
    attention_bias: bool = said(("use_bias", False))
    mlp_bias: bool = said(("use_bias", False))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu"})


Model = standard.Model
plan = standard.plan(Config, {**llama.TENSORS, **llama.INTERLEAVED}, tied=True)


def shared_size(s: Settings, key: str, config: Any) -> None:
    """Check that the total FFN size of the shared experts is 0, or their number times the FFN size of one expert."""
    s.expect(key, 0, config.n_shared * config.expert_size)


def to_the_end(s: Settings, key: str, config: Any) -> None:
    """Check that the last layer with experts is the last layer of the model; -1 also means the last layer."""
    s.expect(key, -1, config.n_layers - 1)


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    normalize: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    mlp_bias: bool = constant(False)
    n_experts: int = declared(Count("moe_num_experts"))
    n_experts_used: int = whole("expert_used_count", ("moe_k", 6), condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1536))
    n_shared: int = whole_or_zero(("expert_shared_count", 0), ("moe_num_shared_experts", 2))
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("moe_layer_start_index", 1))

    expected = Expected(
        gguf={
            "attention.causal": True, "interleave_moe_layer_step": 1, "expert_gating_func": 1,
            "expert_shared_feed_forward_length": shared_size,
        },
        hf={"hidden_act": "silu", "use_bias": False, "moe_layer_interval": 1, "moe_layer_end_index": to_the_end},
        # `moe_norm_min` (1e-12) is a lower bound of the sum by which the weights of a token's experts are divided. The
        # sum is always larger. The other keys are settings of training.
        harmless=(
            "moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "output_router_logits",
            "router_aux_loss_coef",
        ),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        more = {"interleave_moe_layer_step": 1}
        if self.n_shared:  # llama.cpp reads shared experts only if there is a key for their size
            more["expert_shared_feed_forward_length"] = self.n_shared * self.expert_size
        return {**super().to_gguf(), **more}


MOE_TENSORS = llama.dense_first(
    {name: row for name, row in (llama.TENSORS | llama.INTERLEAVED).items() if row.when is None}
)
NAMES = Names(bias="moe_statics.e_score_correction_bias", bias_rows=1, shared="shared_experts")
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, tied=True, experts_of=NAMES)
ARCHITECTURES = (
    Architecture("ERNIE 4.5, dense", ("ernie4_5",), "ernie4_5", Config, Model, plan),
    Architecture(
        "ERNIE 4.5 with a mixture of experts, such as ERNIE-4.5-21B-A3B",
        ("ernie4_5_moe", "ernie4_5-moe"), "ernie4_5-moe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
