"""Qwen2 and Qwen2.5, dense.

Paper: "Qwen2 Technical Report", arXiv 2407.10671. Reference: Hugging Face transformers, models/qwen2.
Differences from Llama: queries, keys and values have biases; small models tie the head to the embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_engine.config.declared import Expected, constant, each_layer
from mlx_engine.config.rope import Rotation, beyond_chunk, chunked_context, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("qwen2",)
GGUF_ARCHITECTURE = "qwen2"


def without_windows(s: Settings, key: str, config: Any) -> None:
    """Check that no layer has a window: layers from `max_window_layers` on have one if both settings ask for it."""
    has_window = s.flag(key, False) and s.whole_or_none("sliding_window", 4096) is not None
    if has_window and s.whole_or_zero("max_window_layers", 28) < config.n_layers:
        raise s.error(key, "False", True)


@dataclass(frozen=True)
class Config(llama.Config):
    """The sizes of a Qwen2 model, as in Llama."""

    context_length: int = chunked_context()
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    beyond_chunk: int | None = beyond_chunk()
    attention_bias: bool = constant(False)

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0},
        hf={
            "hidden_act": "silu",
            "attention_bias": (True, False),  # transformers does not read it: queries, keys and values have biases
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
