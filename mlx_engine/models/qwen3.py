"""Qwen3, dense and with a mixture of experts.

Paper: "Qwen3 Technical Report", arXiv 2505.09388. Reference: Hugging Face transformers, models/qwen3. Differences from
Llama: queries and keys are RMS-normed per head before rotary embedding; head_dim is a separate setting, not
hidden_size / n_heads; small models tie the LM head to the embedding table.

Reference of Qwen3-MoE: models/qwen3_moe. The FFN of every layer is a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import (
    Expected,
    declared,
    divides,
    each_layer,
    number,
    one_per_head,
    rotated_heads,
    whole,
)
from mlx_engine.config.rope import Rotation, beyond_chunk, chunked_context, rotation
from mlx_engine.models import llama, qwen2, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.table import Row


@dataclass(frozen=True)
class Config(llama.Config):
    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), "num_key_value_heads", condition=divides("n_heads")
    )
    context_length: int = chunked_context()
    beyond_chunk: int | None = beyond_chunk()
    head_dim: int = rotated_heads(128)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0},
        hf={
            "hidden_act": "silu",
            "mlp_bias": False,
            "use_sliding_window": qwen2.without_windows,
            "layer_types": each_layer("full_attention"),
        },
        harmless=("sliding_window", "max_window_layers"),
    )


TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_q_norm.weight": Row("model.layers.*.self_attn.q_norm.weight", "E"),
    "blk.*.attn_k_norm.weight": Row("model.layers.*.self_attn.k_norm.weight", "E"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    """The settings of a Qwen3-MoE model. `intermediate_size` is read but unused, because no layer is dense."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    normalize: bool = declared(Normalize(in_gguf=True))

    expected = Expected(
        gguf={key: value for key, value in Config.expected.gguf.items() if key != "expert_count"},
        # The config.json of Qwen3-Coder has the last three keys below; transformers reads none of them.
        hf={
            **Config.expected.hf,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "mlp_only_layers": ([], None),
            "qkv_bias": False,
            "use_qk_norm": True,
            "shared_expert_intermediate_size": (0, None),
        },
        harmless=(*Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


MOE_TENSORS = {name: row for name, row in TENSORS.items() if row.shape not in ("F D", "D F")}
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, experts_of=Names())
ARCHITECTURES = (
    Architecture("Qwen3, dense", ("qwen3",), "qwen3", Config, Model, plan),
    Architecture(
        "Qwen3 with a mixture of experts, such as Qwen3-30B-A3B",
        ("qwen3_moe", "qwen3moe"), "qwen3moe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
