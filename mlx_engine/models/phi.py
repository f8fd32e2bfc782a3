"""Phi-1, Phi-1.5 and Phi-2.

Paper: "Textbooks Are All You Need II", arXiv 2309.05463. Reference: Hugging Face transformers, models/phi. Differences
from Llama: attention and FFN read the same normed hidden states (a parallel block); layer norms with biases; all linear
layers, including the head, have biases; RoPE rotates only a part of each head; the FFN has no gate, and its
activation is GELU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, constant, number, partly_rotated_heads
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("phi", "phi2")
GGUF_ARCHITECTURE = "phi2"


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    rope: Rotation = rotation(partial=True, part=0.5)
    activation: Activation = activation_key(
        {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}, gguf="gelu"
    )
    attention_bias: bool = constant(True)
    mlp_bias: bool = constant(True)

    expected = Expected(gguf={"attention.causal": True})


NAMES = {"model.norm": "model.final_layernorm", "o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"}
USUAL = llama.TENSORS | llama.NORM_BIASES | llama.PARTLY_ROTATED
TENSORS = {
    **llama.renamed({name: row for name, row in USUAL.items() if "ffn_norm" not in name and "gate" not in name}, NAMES),
    "output.bias": Row("lm_head.bias", "V"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
