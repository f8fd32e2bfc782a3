"""Command R and Aya 23; Command R7B and Command A.

Reference: Hugging Face transformers, models/cohere. Differences from Llama: attention and FFN read the same normed
hidden states (a parallel block); norms are layer norms without a bias; rotary pairs are (2j, 2j + 1); logits are
multiplied by `logit_scale`.

Reference of Command R7B and Command A: models/cohere2. Differences from Command R: every fourth layer attends to all
tokens and has no rotary embedding; the other layers (local layers) have a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, number, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.table import Row


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=500_000.0)
    logit_scale: float = number("logit_scale", ("logit_scale", 0.0625))

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none"},
        # Command R+ is refused: its norms of queries and keys have different weights for each head.
        hf={"hidden_act": "silu", "mlp_bias": False, "use_qk_norm": False},
        # transformers reads `max_position_embeddings`, and not this key.
        harmless=("model_max_length",),
    )


TENSORS = {**{name: row for name, row in llama.TENSORS.items() if "ffn_norm" not in name}, **llama.INTERLEAVED}
Model = standard.Model
plan = standard.plan(Config, TENSORS, tied=True)


@dataclass(frozen=True)
class LocalConfig(Config):
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
        # `layer_switch` repeats `sliding_window_pattern`; the other keys do not change the result.
        harmless=("layer_switch", "use_parallel_embedding", "_sliding_window_pattern"),
    )  # fmt: skip


LOCAL_TENSORS = {
    **TENSORS,
    # In some folders, norms have biases, which are all 0.
    "output_norm.bias": Row("model.norm.bias", "D", optional=True),
    "blk.*.attn_norm.bias": Row("model.layers.*.input_layernorm.bias", "D", optional=True),
}
local_plan = standard.plan(LocalConfig, LOCAL_TENSORS, tied=True)
ARCHITECTURES = (
    Architecture("Command R and Aya 23", ("cohere", "command-r"), "command-r", Config, Model, plan),
    Architecture("Command R7B and Command A", ("cohere2",), "cohere2", LocalConfig, Model, local_plan),
)
