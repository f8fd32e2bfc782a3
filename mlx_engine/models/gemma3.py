"""Gemma 3, the text model.

Paper: "Gemma 3 Technical Report", arXiv 2503.19786. Reference: Hugging Face transformers, models/gemma3. Different from
Llama: what attention and the feed-forward network add is normed too, four norms a layer; queries and keys are normed
per head; most layers see a window of the latest tokens, some see all, and the two rotate with different bases; GELU in
the gate; the embedding is scaled by the square root of its width; the head is the embedding table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Activation, Array, LlamaLayer, RMSNorm, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models.config import (
    CLOSE,
    Declared,
    Expected,
    Naming,
    believable,
    declared,
    divides,
    halves,
    n_embeddings,
    number,
    one_per_head,
    whole,
)
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.parameters import Parameters, Plan
from mlx_engine.models.rotation import Rotation, rotation
from mlx_engine.models.settings import HF_HARMLESS, Settings
from mlx_engine.models.table import Row, parts, tensors

ARCHITECTURES = ("gemma3", "gemma3_text")
GGUF_ARCHITECTURE = "gemma3"

# One layer in so many sees everything, where the file does not say otherwise.
PATTERN = 6
# The one size, 27B, whose scores are scaled by hidden_size / n_heads instead of head_dim, which GGUF leaves out.
LAYERS_OF_27B = 62
# Of a config.json whose `text_config` has the model: what belongs to images, and to text in general.
AROUND_TEXT = {
    *HF_HARMLESS,
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "tie_word_embeddings",
    "vision_config",
}
# What a Hugging Face folder may call the text model: alone, or beside a model of images, older and newer.
STEMS = ("model.", "language_model.model.", "model.language_model.")


class LocalLayers:
    """Which layers are local: all but every n-th, or those of config.json's `layer_types`."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        """Return whether each layer is local."""
        prefix = "attention." if naming == "gguf" else ""
        pattern = s.whole(f"{prefix}sliding_window_pattern", PATTERN)
        named = None
        if naming == "hf":
            named = s.words("layer_types", known.n_layers, "sliding_attention", "full_attention")
        if named is not None:
            return tuple(name == "sliding_attention" for name in named)
        return tuple((i + 1) % pattern != 0 for i in range(known.n_layers))

    def to_gguf(self, value: tuple[bool, ...]) -> Mapping[str, object]:
        """Return n, unless it is the usual one; llama.cpp knows no other order of layers."""
        first_global = value.index(False) + 1 if False in value else len(value) + 1
        is_usual = first_global == PATTERN or len(value) < min(first_global, PATTERN)
        return {} if is_usual else {"attention.sliding_window_pattern": first_global}


class AttentionScale:
    """The scale of the scores, for which config.json has its inverse square."""

    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        """Return the scale."""
        if naming == "hf":
            return float(s.number("query_pre_attn_scalar", 256) ** -0.5)
        return s.number("attention.scale", usual_scale(known))

    def to_gguf(self, value: float) -> Mapping[str, object]:
        """Return nothing: llama.cpp reads no scale of a Gemma 3, so that `plan` puts it into a norm."""
        return {}


def usual_scale(cfg: Any) -> float:
    """Return the scale of the scores in a GGUF file that does not say one."""
    per_head = cfg.hidden_size / cfg.n_heads if cfg.n_layers == LAYERS_OF_27B else cfg.head_dim
    return float(per_head**-0.5)


@dataclass(frozen=True)
class Config(Declared):
    """The sizes of a Gemma 3; a local layer's tokens see the last `window` tokens.

    A config.json leaves much to transformers' defaults.
    """

    n_layers: int = whole("block_count", ("num_hidden_layers", 26), condition=believable)
    hidden_size: int = whole("embedding_length", ("hidden_size", 2304))
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 9216))
    n_heads: int = whole("attention.head_count", ("num_attention_heads", 8))
    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), ("num_key_value_heads", 4), condition=divides("n_heads")
    )
    head_dim: int = whole(
        ("attention.key_length", 256), ("head_dim", 256),
        repeated=("attention.value_length", "rope.dimension_count"), condition=halves,
    )  # fmt: skip
    vocab_size: int = whole(("vocab_size", n_embeddings), ("vocab_size", 262_208))
    context_length: int = whole("context_length", ("max_position_embeddings", 131_072))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))
    rope: Rotation = rotation(theta=1e6, rules=("linear",), layers="full_attention")
    local_rope: Rotation = rotation(
        gguf="rope.freq_base_swa", hf="rope_local_base_freq", layers="sliding_attention", always=False
    )
    attention_scale: float = declared(AttentionScale())
    window: int = whole("attention.sliding_window", ("sliding_window", 4096))
    is_local: tuple[bool, ...] = declared(LocalLayers())

    expected = Expected(
        # Zero, or absent: none.
        gguf={"attention.causal": True, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0},
        hf={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
        harmless=("_sliding_window_pattern", "cache_implementation"),
    )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Those of the local layers."""
        return tuple(self.window if is_local else None for is_local in self.is_local)


# Of a norm's weight transformers stores what it is above 1; in GGUF the 1 has been added.
TENSORS = {
    "token_embd.weight": Row("model.embed_tokens.weight", "V D"),
    "output_norm.weight": Row("model.norm.weight", "D", plus=1.0),
    "output.weight": Row("lm_head.weight", "V D"),
    "blk.*.attn_norm.weight": Row("model.layers.*.input_layernorm.weight", "D", plus=1.0),
    "blk.*.attn_q.weight": Row("model.layers.*.self_attn.q_proj.weight", "HE D"),
    "blk.*.attn_k.weight": Row("model.layers.*.self_attn.k_proj.weight", "GE D"),
    "blk.*.attn_v.weight": Row("model.layers.*.self_attn.v_proj.weight", "GE D"),
    "blk.*.attn_q_norm.weight": Row("model.layers.*.self_attn.q_norm.weight", "E", plus=1.0),
    "blk.*.attn_k_norm.weight": Row("model.layers.*.self_attn.k_norm.weight", "E", plus=1.0),
    "blk.*.attn_output.weight": Row("model.layers.*.self_attn.o_proj.weight", "D HE"),
    "blk.*.post_attention_norm.weight": Row("model.layers.*.post_attention_layernorm.weight", "D", plus=1.0),
    "blk.*.ffn_norm.weight": Row("model.layers.*.pre_feedforward_layernorm.weight", "D", plus=1.0),
    "blk.*.ffn_gate.weight": Row("model.layers.*.mlp.gate_proj.weight", "F D"),
    "blk.*.ffn_up.weight": Row("model.layers.*.mlp.up_proj.weight", "F D"),
    "blk.*.ffn_down.weight": Row("model.layers.*.mlp.down_proj.weight", "D F"),
    "blk.*.post_ffw_norm.weight": Row("model.layers.*.post_feedforward_layernorm.weight", "D", plus=1.0),
}
QUERY_NORM = "blk.*.attn_q_norm.weight"


@dataclass(frozen=True, kw_only=True)
class Layer(LlamaLayer):
    """What attention and the feed-forward network add is normed."""

    post_attention_norm: RMSNorm
    post_ffw_norm: RMSNorm
    activation: Activation = "gelu"


class Model(Decoder):
    """Local layers see a window and have a rotation of their own; embeddings are scaled."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        everywhere, nearby = config.rope.for_heads(config.head_dim), config.local_rope.for_heads(config.head_dim)
        layers = [
            Layer(
                **parts(parameters, i, config.norm_eps),
                rope=everywhere if window is None else nearby,
                window=window,
            )
            for i, window in enumerate(config.windows)
        ]
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, scale=config.attention_scale
        )

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return (T, D): the embeddings times the square root of D.

        Where activations are bfloat16 the reference rounds the factor to bfloat16; here both are float32.
        """
        return self.backend.scale(super().embed(ids, positions), self.config.hidden_size**0.5)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the sizes and tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    text = settings if checkpoint.naming == "gguf" else text_settings(settings)
    config = Config.read(text, checkpoint.naming, checkpoint.n_embeddings)
    if checkpoint.naming == "gguf":
        # The head is tied, but a file may have a matrix for it all the same.
        return Plan(config, tensors(config, TENSORS, "optional"))
    stem = next((stem for stem in STEMS if f"{stem}embed_tokens.weight" in checkpoint.shapes), STEMS[0])
    table = {name: replace(row, hf=row.hf.replace(STEMS[0], stem)) for name, row in TENSORS.items()}
    factor = query_norm_factor(config)
    table[QUERY_NORM] = replace(table[QUERY_NORM], times=factor)
    # The head once more, and what reads images.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    if text is not settings:
        unused += [name for name in checkpoint.shapes if "vision_tower." in name or "multi_modal_projector." in name]
    in_tensors = () if factor == 1 else ("attention_scale",)
    return Plan(config, tensors(config, table, "absent"), tuple(unused), in_tensors)


def text_settings(s: Settings) -> Settings:
    """Return the settings of the text model, which a model of text and images keeps in a mapping of their own.

    Raises:
        UnsupportedConfigError: beside that mapping there is a setting that is not known.
    """
    text = s.mapping("text_config")
    if text is None:
        return s
    s.refuse_rest(AROUND_TEXT)
    return text


def query_norm_factor(cfg: Config) -> float:
    """Return the factor of the query norm weight in a GGUF file: not 1 if the model's scale is unusual."""
    factor = cfg.attention_scale / usual_scale(cfg)
    return 1.0 if isclose(factor, 1.0, rel_tol=CLOSE) else factor
