"""Hunyuan, dense (0.5B to 7B) and with a mixture of experts.

Reference: Hugging Face transformers, models/hunyuan_v1_dense. Differences from Llama: heads of queries and keys are
normed, after RoPE; for long contexts, the setting `alpha` raises the base of the rotary frequencies.

Reference of the models with experts: models/hunyuan_v1_moe. Every FFN is a mixture of experts plus a shared expert,
whose output is added without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_engine.config.declared import Expected, Key, declared, number, partly_rotated_heads, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.table import Row


@dataclass(frozen=True)
class Config(llama.Config):
    norms_after_rope: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"), alpha=True)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "use_qk_norm": True, "use_cla": False, "norm_type": "rms",
            "add_classification_head": False, "num_experts": (1, None),
        },
        harmless=("attention_head_dim", "cla_share_factor", "eod_token_id", "org_vocab_size"),
    )  # fmt: skip


TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_q_norm.weight": Row("model.layers.*.self_attn.query_layernorm.weight", "E"),
    "blk.*.attn_k_norm.weight": Row("model.layers.*.self_attn.key_layernorm.weight", "E"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)


def same_in_all(s: Settings, key: str, default: Any) -> int:
    """Return a number that config.json has once, or as a list with the same number for every layer."""
    found = s.counts(key, s.whole("num_hidden_layers", 1))
    if found is None:
        return s.whole(key, default)
    if len(set(found)) != 1 or found[0] < 1:
        raise s.error(key, "one number >= 1 for all layers", found)
    return found[0]


def each(name: str) -> Any:
    """Return a check that a setting equals the config's field `name`; `same_in_all` reads the setting."""

    def check(s: Settings, key: str, config: Any) -> None:
        expected = getattr(config, name)
        if (found := same_in_all(s, key, expected)) != expected:
            raise s.error(key, str(expected), found)

    return check


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    """Hunyuan's settings and those of the experts; `intermediate_size` is the FFN size of one expert."""

    normalize: ClassVar[bool] = True
    n_shared: ClassVar[int] = 1
    intermediate_size: int = whole(
        "expert_feed_forward_length", "intermediate_size",
        repeated=("feed_forward_length", "expert_shared_feed_forward_length"),
    )  # fmt: skip
    n_experts: int = declared(Count())
    n_experts_used: int = declared(Key(same_in_all, "expert_used_count", ("moe_topk", 1), condition=of_all))

    expected = Expected(
        gguf={"attention.causal": True, "expert_shared_count": 1},
        # transformers reads neither `moe_intermediate_size` nor `num_shared_expert`: all experts, and the shared
        # expert, have the FFN size `intermediate_size`.
        hf={
            **{key: of for key, of in Config.expected.hf.items() if key != "num_experts"},
            "moe_intermediate_size": each("intermediate_size"), "num_shared_expert": each("n_shared"),
            "norm_topk_prob": True, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "num_experts_per_tok": None,
        },
        harmless=(
            *Config.expected.harmless, "output_router_logits", "router_aux_loss_coef",
            "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor",
        ),
    )  # fmt: skip


MOE_TENSORS = {name: row for name, row in TENSORS.items() if "mlp" not in row.hf}
NAMES = Names(router="gate.wg", shared="shared_mlp")
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, experts_of=NAMES)
ARCHITECTURES = (
    Architecture(
        "Hunyuan, dense: Hunyuan 0.5B to 7B",
        ("hunyuan_v1_dense", "hunyuan-dense"), "hunyuan-dense", Config, Model, plan,
    ),
    Architecture(
        "Hunyuan with a mixture of experts, such as Hunyuan-A13B",
        ("hunyuan_v1_moe", "hunyuan-moe"), "hunyuan-moe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
