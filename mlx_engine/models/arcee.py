"""Arcee's foundation models, such as AFM-4.5B.

Reference: Hugging Face transformers, models/arcee. Difference from Llama: the FFN has no gate, and its activation is
the square of ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("arcee",)
GGUF_ARCHITECTURE = "arcee"


@dataclass(frozen=True)
class Config(llama.Config):
    rope: Rotation = rotation(rules=EVERY_RULE)
    activation: Activation = activation_key({"relu2": "relu2"}, gguf="relu2")

    expected = Expected(gguf={"attention.causal": True})


TENSORS = {name: row for name, row in (llama.TENSORS | llama.PERMUTED).items() if "ffn_gate" not in name}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
