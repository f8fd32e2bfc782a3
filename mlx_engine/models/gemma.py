"""Gemma 1 and CodeGemma.

Paper: "Gemma: Open Models Based on Gemini Research and Technology", arXiv 2403.08295. Reference: Hugging Face
transformers, models/gemma. Differences from Llama: embeddings are scaled by the square root of the hidden size; folders
store norm weights minus 1; the gate's activation is GELU; the head is tied to the embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, rotated_heads
from mlx_engine.models import gemma3, llama, standard

ARCHITECTURES = ("gemma",)
GGUF_ARCHITECTURE = "gemma"


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = rotated_heads(256, 256)
    # The config.json of the first releases has "gelu", transformers' name of the exact GELU. But the models were
    # trained with the tanh approximation, which `Activation` calls "gelu".
    activation: Activation = activation_key({"gelu_pytorch_tanh": "gelu", "gelu": "gelu"}, gguf="gelu")

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (None, False),
            **llama.NO_BIAS,
        },
    )


class Model(gemma3.ScaledEmbeddings, standard.Model):
    """A Llama model with scaled embeddings."""


TENSORS = {
    name: replace(row, plus=1.0) if "norm" in name else row
    for name, row in llama.TENSORS.items()
    if not name.endswith("bias")
}
plan = standard.plan(Config, TENSORS, tied=True)
