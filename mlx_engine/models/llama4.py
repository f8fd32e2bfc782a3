"""Llama 4, the text model, such as Llama-4-Scout.

Reference: Hugging Face transformers, models/llama4. Differences from Llama:
- every layer, or every second layer, has a mixture of experts. A token uses one expert. The expert's input is
  multiplied by the sigmoid of the expert's router logit. The output of a shared expert is added without a gate;
- every fourth layer has no rotary embedding, and may scale its queries by a factor that grows with the position;
- in the other layers, the context is divided into chunks (of 8,192 tokens by default). A token attends only to tokens
  of its own chunk. In these layers, query and key heads may have a norm without weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.experts import Scoring
from mlx_engine.backends.parameters import Growth, Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Naming, constant, declared, number, rotated_heads, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models import llama, ministral3, standard
from mlx_engine.models.layer import Attention, LayerTensors
from mlx_engine.weights.experts import Count, Names, OfFolders, Routed
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("llama4_text", "llama4")
GGUF_ARCHITECTURE = "llama4"
# The default number of tokens per chunk. GGUF has no key for this number.
CHUNK = 8192
# Keys that config.json may have next to `text_config`. `plan` checks `tie_word_embeddings`; the others are not read.
AROUND_TEXT = {*ministral3.AROUND_TEXT, "boi_token_index", "eoi_token_index", "tie_word_embeddings"}
# The number of experts of Llama 4 Maverick, whose heads are not normed. GGUF has no key for `use_qk_norm`, so in a GGUF
# file, heads are normed unless the model has this number of experts.
OF_MAVERICK = 128


class Chunk(OfFolders):
    """The setting of the number of tokens per chunk: at most the context length."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        return int(min(super().read(s, naming, known), known.context_length))


def chunked_if_rotated(s: Settings, key: str, config: Any) -> None:
    """Check that the list of layer types, if present, has chunked attention in exactly the layers with RoPE."""
    s.expect(key, ["chunked_attention" if rotated else "full_attention" for rotated in config.has_rope], None)


def one_expert(n_used: int, known: Any) -> str | None:
    """Return None if a token uses one expert, otherwise the expected number as text."""
    return None if n_used == 1 else "1"


def with_these_experts(s: Settings, key: str, config: Any) -> None:
    """Check that the list of layers with experts, if present, names every n-th layer, with n = `config.every`."""
    s.expect(key, [i for i, kind in enumerate(config.ffn_kinds) if kind == "sparse"], None)


def flag_or_number(s: Settings, key: str, default: Any) -> bool:
    """Return a flag. Some published files have a number instead; numbers above 0 mean true."""
    try:
        return s.flag(key, default)
    except UnsupportedConfigError:
        return s.whole_or_zero(key) > 0


@dataclass(frozen=True)
class Config(Routed, llama.Config):
    scoring: ClassVar[Scoring] = "sigmoid"
    weighs_inputs: ClassVar[bool] = True
    normalize: ClassVar[bool] = False
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size_mlp", 16384))
    head_dim: int = rotated_heads(128)
    context_length: int = whole("context_length", ("max_position_embeddings", 131_072))
    chunk: int = declared(Chunk(CHUNK, "attention_chunk_size", Settings.whole, usual=CHUNK))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=500_000.0, rules=EVERY_RULE)
    has_rope: tuple[bool, ...] = layer_kinds(
        4, None, interval={"hf": "no_rope_layer_interval"}, flags={"hf": "no_rope_layers"}
    )
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 1), condition=one_expert)
    expert_size: int = whole("expert_feed_forward_length", ("intermediate_size", 8192))
    n_shared: int = constant(1)
    every: int = whole(("interleave_moe_layer_step", 1), ("interleave_moe_layer_step", 1))
    use_qk_norm: bool = declared(OfFolders(lambda known: known.n_experts != OF_MAVERICK, "use_qk_norm", usual=True))
    grows: bool = declared(OfFolders(True, "attn_temperature_tuning", flag_or_number, usual=True))
    growth: float = number(("attention.temperature_scale", 0.1), ("attn_scale", 0.1))
    growth_step: int = whole(("attention.temperature_length", 8192), ("floor_scale", 8192))

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2},
        hf={
            "hidden_act": "silu", "mlp_bias": False, "moe_layers": with_these_experts,
            "layer_types": chunked_if_rotated, "for_llm_compressor": False,
        },
        harmless=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )  # fmt: skip

    @property
    def windows(self) -> tuple[int | None, ...]:
        is_cut = self.chunk < self.context_length
        return tuple(-self.chunk if rotated and is_cut else None for rotated in self.has_rope)

    @property
    def ffn_kinds(self) -> tuple[str, ...]:
        return tuple("dense" if (i + 1) % self.every else "sparse" for i in range(self.n_layers))


class Model(standard.Model):
    def mixer(self, config: Config, t: LayerTensors, rope: Rope | None, window: int | None) -> Attention:
        made = super().mixer(config, t, rope, window)
        if rope is None and config.grows:
            growth = Growth(config.growth, config.growth_step, 1)
            return replace(made, rope=replace(Rope.none(config.head_dim), growth=growth))
        # Here, heads are normed before the rotary embedding; transformers norms them after it. The result is the same,
        # because a norm without weights commutes with a rotation.
        if rope is not None and config.use_qk_norm:
            return replace(made, norms=(t.p.plain_norm("head_norm", config.head_dim, config.norm_eps),) * 2)
        return made


TENSORS = llama.renamed(llama.dense_first(llama.TENSORS | llama.INTERLEAVED), {"mlp": "feed_forward"})
NAMES = Names("feed_forward", router="router", stacked="experts", are_transposed=True)


def plan(checkpoint: Checkpoint) -> Plan:
    if "text_config" in checkpoint.settings:
        Settings(checkpoint.settings, where=checkpoint.where).expect("tie_word_embeddings", False)
    return ministral3.text_plan(checkpoint, of_text, AROUND_TEXT)


def of_text(checkpoint: Checkpoint, settings: Settings | None) -> Plan:
    made = standard.with_rotation(checkpoint, decoder_plan(checkpoint, Config, TENSORS, settings=settings))
    return standard.with_mixture(made, checkpoint, NAMES)
