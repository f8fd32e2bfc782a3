"""gpt-oss 20B and 120B.

Paper: "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925. Reference: Hugging Face transformers, models/gpt_oss.
Differences from Qwen3-MoE: attention sinks (one learned softmax term per query head); sliding-window attention in every
second layer; YaRN's ramp begins and ends at pair indices that are not rounded (llama.cpp rounds them; GGUF has no key
for this choice); biases of all linear layers except the head; clamped SwiGLU in each expert. Experts are published in
MXFP4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.parameters import SWIGLU_ALPHA, SWIGLU_LIMIT, Gating, Rope, Scores
from mlx_engine.config.declared import Expected, constant, declared, number, same_as, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, qwen2, standard
from mlx_engine.models.layer import Attention, LayerTensors
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.table import Row

ARCHITECTURES = ("gpt_oss", "gpt-oss")
GGUF_ARCHITECTURE = "gpt-oss"


def has_yarn(s: Settings, key: str, config: Any) -> None:
    """Check that config.json has the settings of YaRN, because this engine has no defaults for them."""
    if s.mapping("rope_parameters") is None and s.mapping(key) is None:
        raise s.error(key, "the settings of YaRN", None)


@dataclass(frozen=True)
class Config(Routed, llama.Config):
    """Llama's settings, those of the experts, and the window; `intermediate_size` is the FFN size of one expert."""

    activation: ClassVar[Gating] = "clamped_swiglu"
    normalize: ClassVar[bool] = True
    intermediate_size: int = whole("expert_feed_forward_length", "intermediate_size", repeated=("feed_forward_length",))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=150_000.0, rules=("yarn",), truncates=False)
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    window: int = whole("attention.sliding_window", ("sliding_window", 128))
    # By default, every second layer is local (has the window), from layer 0 on. GGUF has no key for the local layers.
    is_local: tuple[bool, ...] = layer_kinds(2)
    attention_bias: bool = constant(False)  # not read: TENSORS always has the biases

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu",
            "attention_bias": True,
            "mlp_bias": False,
            "rope_scaling": has_yarn,
            "swiglu_alpha": SWIGLU_ALPHA,
            "swiglu_limit": SWIGLU_LIMIT,
            "experts_per_token": same_as("n_experts_used"),
        },
        # `initial_context_length` repeats YaRN's `original_max_position_embeddings`.
        harmless=("initial_context_length", "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {
    **{name: row for name, row in qwen2.TENSORS.items() if row.shape not in ("F D", "D F")},
    "blk.*.attn_output.bias": Row("model.layers.*.self_attn.o_proj.bias", "D"),
    "blk.*.attn_sinks.weight": Row("model.layers.*.self_attn.sinks", "H"),
    "blk.*.ffn_norm.weight": replace(qwen2.TENSORS["blk.*.ffn_norm.weight"], gguf="blk.*.post_attention_norm.weight"),
}
NAMES = Names(router="router", interleaved=True)


class Model(standard.Model):
    def mixer(self, config: Config, t: LayerTensors, rope: Rope | None, window: int | None) -> Attention:
        scores = Scores(config.head_dim**-0.5, sinks=t.p.vector(f"blk.{t.i}.attn_sinks"))
        return Attention.read(t, config, rope, scores, window)


plan = standard.plan(Config, TENSORS, experts_of=NAMES)
