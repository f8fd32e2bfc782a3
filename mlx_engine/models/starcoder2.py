"""StarCoder2.

Paper: "StarCoder 2 and The Stack v2", arXiv 2402.19173. Reference: Hugging Face transformers, models/starcoder2.
Differences from Llama: layer norms with biases; all linear layers except the head have biases; the FFN has no gate, and
its activation is GELU; some releases have sliding-window attention, which llama.cpp ignores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, number, said, whole_or_none
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("starcoder2",)
GGUF_ARCHITECTURE = "starcoder2"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's settings. If `window` is not None, a token attends to itself and the `window - 1` tokens before it."""

    layer_norms: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_epsilon", ("norm_epsilon", 1e-5))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    window: int | None = whole_or_none(None, ("sliding_window", None))
    activation: Activation = activation_key({"gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}, gguf="gelu")
    attention_bias: bool = said(("use_bias", True))
    mlp_bias: bool = said(("use_bias", True))

    expected = Expected(
        gguf={"attention.causal": True}, hf={"mlp_type": "default", "norm_type": "layer_norm"},
        harmless=(
            "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        ),
    )  # fmt: skip


LAYER = "model.layers.*."
TENSORS = {
    **{name: row for name, row in llama.TENSORS.items() if "ffn_" not in name},
    "output_norm.bias": Row("model.norm.bias", "D"),
    "blk.*.attn_norm.bias": Row(f"{LAYER}input_layernorm.bias", "D"),
    "blk.*.ffn_norm.weight": Row(f"{LAYER}post_attention_layernorm.weight", "D"),
    "blk.*.ffn_norm.bias": Row(f"{LAYER}post_attention_layernorm.bias", "D"),
    "blk.*.ffn_up.weight": Row(f"{LAYER}mlp.c_fc.weight", "F D"),
    "blk.*.ffn_up.bias": Row(f"{LAYER}mlp.c_fc.bias", "F", when="mlp_bias"),
    "blk.*.ffn_down.weight": Row(f"{LAYER}mlp.c_proj.weight", "D F"),
    "blk.*.ffn_down.bias": Row(f"{LAYER}mlp.c_proj.bias", "D", when="mlp_bias"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS, tied=True)
