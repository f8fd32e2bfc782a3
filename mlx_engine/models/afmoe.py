"""AFMoE, such as Trinity-Mini.

Reference: Hugging Face transformers, models/afmoe. Differences from Qwen3-MoE: the outputs of attention and FFN are
normed, too; attention has a gate; by default, every fourth layer attends to all tokens and has no rotary embedding,
while all other layers have a window; the router chooses the experts with the largest sigmoid(logit) + bias; the
output of the shared experts is added without a gate; the first layers are dense; with `mup_enabled`, embeddings are
multiplied by the square root of their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.backends.parameters import Array, Token
from mlx_engine.config.declared import Expected, constant, declared, number, rotated_heads, whole, whole_or_zero
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import glm4_moe, llama, qwen3, standard
from mlx_engine.weights.experts import Count, Names, OfFolders, of_all
from mlx_engine.weights.table import Row

ARCHITECTURES = ("afmoe",)
GGUF_ARCHITECTURE = "afmoe"


@dataclass(frozen=True)
class Config(glm4_moe.Sigmoids, llama.Config):
    only_local_rope: ClassVar[bool] = True
    head_dim: int = rotated_heads(128)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    window: int = whole("attention.sliding_window", ("sliding_window", 1024))
    # GGUF has no key for the interval of layers without a window: llama.cpp assumes 4.
    is_local: tuple[bool, ...] = layer_kinds(4, interval={"hf": "global_attn_every_n_layers"})
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 6), condition=of_all)
    n_shared: int = whole(("expert_shared_count", 1), ("num_shared_experts", 2))
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("num_dense_layers", 1))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("route_scale", 1.0))
    normalize: bool = constant(True)
    n_groups: int = constant(1)
    n_groups_used: int = constant(1)
    is_scaled: bool = declared(OfFolders(in_gguf=True, hf="mup_enabled"))

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2, "expert_weights_norm": True},
        # transformers reads only `hidden_act`; for the other keys, its code implements only these values.
        hf={
            "hidden_act": "silu", "mlp_bias": False, "route_norm": True, "score_func": "sigmoid", "n_group": 1,
            "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1,
        },
        harmless=("output_router_logits", "load_balance_coeff", "use_grouped_mm"),
    )  # fmt: skip


TENSORS = {
    **{name: row for name, row in llama.dense_first(qwen3.TENSORS).items() if name != "blk.*.ffn_norm.weight"},
    "blk.*.attn_gate.weight": Row("model.layers.*.self_attn.gate_proj.weight", "HE D"),
    "blk.*.post_attention_norm.weight": Row("model.layers.*.post_attention_layernorm.weight", "D"),
    "blk.*.ffn_norm.weight": Row("model.layers.*.pre_mlp_layernorm.weight", "D"),
    "blk.*.post_ffw_norm.weight": Row("model.layers.*.post_mlp_layernorm.weight", "D"),
}
NAMES = Names(router="router.gate", bias="expert_bias", shared="shared_experts")


class Model(standard.Model):
    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        x = super().embed(ids, positions)
        return self.backend.scale(x, self.config.hidden_size**0.5) if self.config.is_scaled else x


plan = standard.plan(Config, TENSORS, experts_of=NAMES)
