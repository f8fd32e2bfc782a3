"""Granite 3, and the dense models of Granite 4.

Reference: Hugging Face transformers, models/granite, and models/granitemoehybrid where all layers have attention and
none has experts. Differences from Llama: multipliers of the embeddings, of the attention scores, of what attention and
FFN add to the hidden states, and of the logits. Granite 4 stores gate and up as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, each_layer, number, stated, whole
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row

ARCHITECTURES = ("granite", "granitemoehybrid")
GGUF_ARCHITECTURE = "granite"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, and the multipliers; `logits_divisor` divides the logits."""

    attention_multiplier: float = number(
        ("attention.scale", lambda known: known.head_dim**-0.5), ("attention_multiplier", 1.0)
    )
    embedding_multiplier: float = number(("embedding_scale", 1.0), ("embedding_multiplier", 1.0))
    residual_multiplier: float = number(("residual_scale", 1.0), ("residual_multiplier", 1.0))
    logits_divisor: float = number("logit_scale", ("logits_scaling", 1.0))

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": True},
        hf={"hidden_act": "silu"},
    )


@dataclass(frozen=True)
class HybridConfig(Config):
    """The config of Granite 4, whose other models have experts, and layers with a state in place of attention."""

    intermediate_size: int = whole("feed_forward_length", ("shared_intermediate_size", 1024))

    expected = Expected(
        hf={
            **Config.expected.hf,
            "mlp_bias": False,
            "position_embedding_type": stated("rope"),
            "layer_types": each_layer("attention", "full_attention"),
            "layers_block_type": each_layer("attention", "full_attention"),
            "num_local_experts": 0,
            "normalization_function": "rmsnorm",
            "init_method": "mup",
        },
        # Settings of the layers with a state, and of experts.
        harmless=(
            *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
            *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok"),
            *("intermediate_size", "output_router_logits", "router_aux_loss_coef"),
        ),
    )


GATE_UP, DOWN = (f"model.layers.*.shared_mlp.{name}_linear.weight" for name in ("input", "output"))
GATE_OF_MLX = "model.layers.0.mlp.gate_proj.weight"
HYBRID_TENSORS = {
    **llama.TENSORS,
    **llama.PERMUTED,
    "blk.*.ffn_gate.weight": Row(GATE_UP, "F D", after=("F",)),
    "blk.*.ffn_up.weight": Row(GATE_UP, "F D", before=("F",)),
    "blk.*.ffn_down.weight": Row(DOWN, "D F"),
}


class Model(Decoder):
    """A Llama model with multipliers.

    Hidden states are divided by the residual multiplier m, so that the sum of a layer needs no multiplication. The
    norms have the same results with an epsilon that is divided by m**2. The divisor of the logits is in the last norm.
    """

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = standard.rope_of(parameters, config), config.norm_eps / config.residual_multiplier**2
        scores = Scores(config.attention_multiplier)
        layers = [
            Layer(
                norm=t.norm("attn_norm"),
                branches=(Branch(Attention.read(t, config, rope, scores), t.linear("attn_output")),),
                ffn=standard.feed_forward(t, config),
            )
            for t in LayerTensors.of(parameters, config.n_layers, eps)
        ]  # fmt: skip
        output_norm = parameters.rms_norm("output_norm", eps, times=1 / config.logits_divisor)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return (T, D), the embeddings times their multiplier, divided by the residual multiplier."""
        of = self.config
        return self.backend.scale(super().embed(ids, positions), of.embedding_multiplier / of.residual_multiplier)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    if checkpoint.naming == "gguf" or checkpoint.architecture == "granite":
        return standard.plan(Config, llama.TENSORS | llama.PERMUTED)(checkpoint)
    # mlx-community folders have gate and up apart, under Llama's names.
    is_split = GATE_OF_MLX in checkpoint.shapes
    return standard.plan(HybridConfig, llama.TENSORS | llama.PERMUTED if is_split else HYBRID_TENSORS)(checkpoint)
