"""EXAONE 4.0.

Paper: "EXAONE 4.0", arXiv 2507.11407. Reference: Hugging Face transformers, models/exaone4. Differences from Llama: the
outputs of attention and FFN are normed, not their inputs; heads of queries and keys are normed; with a window, every
fourth layer attends to all tokens and has no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.config.declared import Expected, Key, declared, number
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, olmo2, qwen3, standard

ARCHITECTURES = ("exaone4",)
GGUF_ARCHITECTURE = "exaone4"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes. Tokens of local layers attend to the last `window` tokens; 0 is no window."""

    only_local_rope: ClassVar[bool] = True
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(rules=EVERY_RULE)
    window: int = declared(Key(Settings.whole_or_zero, ("attention.sliding_window", 0), ("sliding_window", 0)))
    is_local: tuple[bool, ...] = layer_kinds(4, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={"hidden_act": "silu", **llama.NO_BIAS, "sliding_window_pattern": (4, "LLLG", 0, None)},
    )


TENSORS = {**olmo2.TENSORS, **{name: row for name, row in qwen3.TENSORS.items() if row.shape == "E"}}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
