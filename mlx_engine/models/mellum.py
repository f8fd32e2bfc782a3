"""Mellum 2.

Reference: Hugging Face transformers, models/mellum. Difference from Qwen3-MoE: some layers are local. Local
layers have sliding-window attention, and other settings of the rotary embedding than the layers with full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, declared, each_layer, number, whole_or_zero
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, qwen3, standard
from mlx_engine.weights.experts import Names, Normalize

ARCHITECTURES = ("mellum",)
GGUF_ARCHITECTURE = "mellum"


@dataclass(frozen=True)
class Config(qwen3.MoeConfig):
    """Qwen3-MoE's settings. In local layers, a token attends to itself and the `window - 1` tokens before it.

    If `window` is 0, no layer is local.
    """

    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))
    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"), layers="full_attention")
    local_rope: Rotation = rotation(gguf="rope.freq_base_swa", layers="sliding_attention")
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 1024))
    is_local: tuple[bool, ...] = layer_kinds(1, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True)
    normalize: bool = declared(Normalize(in_gguf=True, usual=True))

    expected = Expected(
        gguf={"attention.causal": True},
        hf={"hidden_act": "silu", "mlp_layer_types": each_layer("sparse"), **llama.NO_BIAS},
        harmless=("mtp_layer_types", "mtp_mlp_layer_types", "output_router_logits", "router_aux_loss_coef"),
    )


Model = standard.Model
plan = standard.plan(Config, qwen3.MOE_TENSORS, experts_of=Names())
