"""Qwen2 and Qwen2.5, dense and with a mixture of experts; Qwen1.5-MoE; MiMo 7B.

Paper: "Qwen2 Technical Report", arXiv 2407.10671. Reference: Hugging Face transformers, models/qwen2. Differences from
Llama: queries, keys and values have biases; small models tie the head to the embedding table.

Reference of the mixtures: models/qwen2_moe. Every FFN is a mixture of experts plus a shared expert, which all tokens
use. The router's top-k weights are not renormalised by default; the shared expert's output is scaled by a sigmoid gate.

Report of MiMo: "MiMo", arXiv 2505.07608. Reference: mlx-lm, models/mimo. The layers are Qwen2's; MiMo's layer for
multi-token prediction is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_engine.config.declared import Expected, constant, declared, each_layer, whole
from mlx_engine.config.rope import Rotation, beyond_chunk, chunked_context, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.experts import Count, Names, Normalize, Routed, of_all
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.table import Row


def without_windows(s: Settings, key: str, config: Any) -> None:
    """Check that no layer has a window. With `use_sliding_window`, layers from `max_window_layers` on have a window."""
    has_window = s.flag(key, False) and s.whole_or_none("sliding_window", 4096) is not None
    if has_window and s.whole_or_zero("max_window_layers", 28) < config.n_layers:
        raise s.error(key, "False", True)


@dataclass(frozen=True)
class Config(llama.Config):
    context_length: int = chunked_context()
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    beyond_chunk: int | None = beyond_chunk()
    # False, because the output projection has no bias. Queries, keys and values always have biases: in `TENSORS`, the
    # rows of these biases do not depend on this field.
    attention_bias: bool = constant(False)

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0},
        hf={
            "hidden_act": "silu",
            "attention_bias": (True, False),  # not read by transformers: queries, keys and values always have biases
            "qkv_bias": True,
            "mlp_bias": False,
            "use_sliding_window": without_windows,
            "use_mrope": False,  # multimodal RoPE: three position coordinates, for images
            "layer_types": each_layer("full_attention"),
        },
        harmless=("sliding_window", "max_window_layers"),
    )


TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_q.bias": Row("model.layers.*.self_attn.q_proj.bias", "HE"),
    "blk.*.attn_k.bias": Row("model.layers.*.self_attn.k_proj.bias", "GE"),
    "blk.*.attn_v.bias": Row("model.layers.*.self_attn.v_proj.bias", "GE"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    """The settings of a Qwen2-MoE model. `intermediate_size` is read but unused: no layer is dense."""

    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    shared_size: int = whole("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
    normalize: bool = declared(Normalize(in_gguf=False))

    expected = Expected(
        gguf={key: value for key, value in Config.expected.gguf.items() if key != "expert_count"},
        hf={
            **Config.expected.hf,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "mlp_only_layers": ([], None),
        },
        harmless=(*Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


MOE_TENSORS = {name: row for name, row in TENSORS.items() if row.shape not in ("F D", "D F")}
moe_plan = standard.plan(MoeConfig, MOE_TENSORS, experts_of=Names())
ARCHITECTURES = (
    Architecture("Qwen2 and Qwen2.5, dense", ("qwen2",), "qwen2", Config, Model, plan),
    Architecture(
        "Qwen1.5-MoE and Qwen2 with a mixture of experts, such as Qwen2-57B-A14B",
        ("qwen2_moe", "qwen2moe"), "qwen2moe", MoeConfig, Model, moe_plan,
    ),
    Architecture("MiMo 7B", ("mimo",), "qwen2", Config, Model, plan),
)  # fmt: skip
