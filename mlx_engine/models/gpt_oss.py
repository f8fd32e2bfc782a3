"""gpt-oss 20B and 120B.

Paper: "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925. Reference: Hugging Face transformers, models/gpt_oss.
Differences from Qwen3-MoE: a sink for each query head in the softmax of attention; sliding-window attention in every
second layer; YaRN whose limits are not rounded; biases of all linear layers; a clamped gate in each expert. The
matrices of experts are published in MXFP4. llama.cpp does round the limits of YaRN, because GGUF has no key for this
setting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import SWIGLU_ALPHA, SWIGLU_LIMIT, Rope, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, constant, declared, number, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, qwen2
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors, Mixture
from mlx_engine.weights.experts import Count, Names, experts, of_all, with_experts
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, decoder_plan

ARCHITECTURES = ("gpt_oss", "gpt-oss")
GGUF_ARCHITECTURE = "gpt-oss"
THETA = 150_000.0  # transformers' default


def has_yarn(s: Settings, key: str, config: Any) -> None:
    """Check that config.json has settings of YaRN, because transformers assumes other settings if they are missing."""
    if s.mapping("rope_parameters") is None and s.mapping(key) is None:
        raise s.error(key, "the settings of YaRN", None)


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's settings, the numbers of experts and the window; `intermediate_size` is the FFN size of one expert."""

    intermediate_size: int = whole("expert_feed_forward_length", "intermediate_size", repeated=("feed_forward_length",))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=THETA, rules=("yarn",), truncates=False)
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    window: int = declared(Key(Settings.whole, "attention.sliding_window", ("sliding_window", 128)))
    # GGUF has no key for another order of layers.
    is_local: tuple[bool, ...] = layer_kinds(2)
    attention_bias: bool = constant(False)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu",
            "attention_bias": True,
            "mlp_bias": False,
            "rope_scaling": has_yarn,
            "swiglu_alpha": SWIGLU_ALPHA,
            "swiglu_limit": SWIGLU_LIMIT,
            "experts_per_token": lambda s, key, config: s.expect(key, config.n_experts_used),
        },
        # `initial_context_length`, the context of the training, is also in the settings of YaRN.
        harmless=("initial_context_length", "output_router_logits", "router_aux_loss_coef"),
    )


TENSORS = {
    **{name: row for name, row in qwen2.TENSORS.items() if row.shape not in ("F D", "D F")},
    "blk.*.attn_output.bias": Row("model.layers.*.self_attn.o_proj.bias", "D"),
    "blk.*.attn_sinks.weight": Row("model.layers.*.self_attn.sinks", "H"),
    "blk.*.ffn_norm.weight": replace(qwen2.TENSORS["blk.*.ffn_norm.weight"], gguf="blk.*.post_attention_norm.weight"),
}
NAMES = Names(router="router", interleaved=True)


class Model(Decoder):
    """A decoder with attention sinks, and mixtures of experts with biases and clamped gates."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = config.rope.for_heads(config.head_dim), config.norm_eps
        routing = Routing(config.n_experts_used, normalize=True)
        layers = [
            Layer(
                norm=t.norm("attn_norm"),
                branches=(_attention(config, t, rope, window),),
                ffn=Mixture(t.norm("ffn_norm"), experts(parameters, t.i, config.n_experts, routing, "clamped_swiglu")),
            )
            for t, window in zip(LayerTensors.of(parameters, config.n_layers, eps), config.windows, strict=True)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers)


def _attention(config: Config, t: LayerTensors, rope: Rope, window: int | None) -> Branch:
    scores = Scores(config.head_dim**-0.5, sinks=t.p.vector(f"blk.{t.i}.attn_sinks"))
    return Branch(Attention.read(t, config, rope, scores, window), t.linear("attn_output"))


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    made = decoder_plan(checkpoint, Config, TENSORS)
    return with_experts(made, checkpoint, NAMES, made.config.intermediate_size)
