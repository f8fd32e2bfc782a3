"""Qwen3, dense.

Paper: "Qwen3 Technical Report", arXiv 2505.09388. Reference: Hugging Face transformers, models/qwen3.
Differences from Llama: queries and keys are RMS-normed per head before rotary embedding; head_dim is a setting of its
own, not hidden_size / n_heads; small models tie the head to the embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, divides, each_layer, halves, number, one_per_head, per_head, whole
from mlx_engine.config.rope import Rotation, beyond_chunk, chunked_context, rotation
from mlx_engine.models import llama, qwen2, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("qwen3",)
GGUF_ARCHITECTURE = "qwen3"


@dataclass(frozen=True)
class Config(llama.Config):
    """The settings of a Qwen3 model. The fields below differ from Llama's in defaults or in RoPE scaling."""

    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), "num_key_value_heads", condition=divides("n_heads")
    )
    context_length: int = chunked_context()
    beyond_chunk: int | None = beyond_chunk()
    head_dim: int = whole(
        ("attention.key_length", per_head), ("head_dim", 128),
        repeated=("attention.value_length", "rope.dimension_count"), condition=halves,
    )  # fmt: skip
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
