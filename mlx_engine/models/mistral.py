"""Mistral 7B and related dense models.

Paper: "Mistral 7B", arXiv 2310.06825. Reference: Hugging Face transformers, models/mistral.
Difference from Llama: some releases have sliding-window attention. GGUF files have the architecture "llama".
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, whole_or_none
from mlx_engine.models import llama, standard

ARCHITECTURES = ("mistral",)
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, and `window`: the latest tokens that a token attends to, itself included; None for all tokens."""

    window: int | None = whole_or_none(None, ("sliding_window", 4096))

    expected = Expected(
        gguf=llama.Config.expected.gguf,
        hf={"hidden_act": "silu", **llama.NO_BIAS},
        harmless=("max_sequence_length",),
    )


Model = standard.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED)
