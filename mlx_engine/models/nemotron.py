"""Nemotron-4 and Minitron, dense.

Reference: Hugging Face transformers, models/nemotron. Differences from Llama: norms are layer norms with biases, and
folders store the norm weights minus 1; RoPE rotates only a part of each head; the FFN has no gate, and its activation
is the square of ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, number, partly_rotated_heads
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("nemotron",)
GGUF_ARCHITECTURE = "nemotron"


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_epsilon", ("norm_eps", 1e-5))
    rope: Rotation = rotation(rules=("linear",), partial=True, part=0.5)
    activation: Activation = activation_key({"relu2": "relu2"}, gguf="relu2")

    # `rope_percent` repeats `partial_rotary_factor`; transformers reads only the latter.
    expected = Expected(gguf={"attention.causal": True}, harmless=("rope_percent",))


TENSORS = {
    name: replace(row, plus=1.0) if name.endswith("norm.weight") else row
    for name, row in (llama.TENSORS | llama.NORM_BIASES | llama.PARTLY_ROTATED).items()
    if "ffn_gate" not in name
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
