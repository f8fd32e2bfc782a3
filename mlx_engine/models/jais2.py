"""Jais 2, bilingual models of Arabic and English.

Reference: Hugging Face transformers, models/jais2. Differences from Llama: layer norms with biases; the linear layers
of attention and FFN have biases; the FFN has no gate, and its activation is the square of ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, number, said
from mlx_engine.models import llama, standard

ARCHITECTURES = ("jais2",)
GGUF_ARCHITECTURE = "jais2"


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    activation: Activation = activation_key({"relu2": "relu2"}, gguf="relu2")
    attention_bias: bool = said(("attention_bias", True))
    mlp_bias: bool = said(("mlp_bias", True))

    expected = Expected(gguf={"attention.causal": True})


TENSORS = {name: row for name, row in (llama.TENSORS | llama.NORM_BIASES).items() if "ffn_gate" not in name}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
