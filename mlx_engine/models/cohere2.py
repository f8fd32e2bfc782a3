"""Command R7B and Command A.

Reference: Hugging Face transformers, models/cohere2. Differences from Command R: every fourth layer attends to all
tokens and has no rotary embedding; the others have a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import cohere, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("cohere2",)
GGUF_ARCHITECTURE = "cohere2"


@dataclass(frozen=True)
class Config(cohere.Config):
    """Command R's sizes. Tokens of local layers attend to the last `window` tokens."""

    only_local_rope: ClassVar[bool] = True
    rope: Rotation = rotation()
    window: int = whole("attention.sliding_window", ("sliding_window", 4096))
    is_local: tuple[bool, ...] = layer_kinds(
        4, interval={"hf": "sliding_window_pattern"}, flags={"gguf": "attention.sliding_window_pattern"}
    )

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none"},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False,
        },
        # Where the reference computes; `layer_switch` repeats `sliding_window_pattern`.
        harmless=("layer_switch", "use_parallel_embedding", "_sliding_window_pattern"),
    )  # fmt: skip


TENSORS = {
    **cohere.TENSORS,
    # Some folders have biases of norms, which are 0.
    "output_norm.bias": Row("model.norm.bias", "D", optional=True),
    "blk.*.attn_norm.bias": Row("model.layers.*.input_layernorm.bias", "D", optional=True),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS, tied=True)
