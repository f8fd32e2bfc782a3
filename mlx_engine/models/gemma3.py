"""Gemma 3, the text model.

Paper: "Gemma 3 Technical Report", arXiv 2503.19786. Reference: Hugging Face transformers, models/gemma3. Differences
from Llama: the outputs of attention and FFN are normed, too; queries and keys are normed per head; most layers have
sliding-window attention (local layers), the others attend to all tokens (global layers), and the two kinds have
different RoPE bases; the gate's activation is GELU; embeddings are scaled by the square root of the hidden size; the
head is tied to the embedding table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, ClassVar

from mlx_engine.backends.parameters import Activation, Array, Rope, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    CLOSE,
    ConfigBase,
    Expected,
    Naming,
    Setting,
    believable,
    declared,
    divides,
    n_embeddings,
    number,
    one_per_head,
    rotated_heads,
    whole,
)
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import HARMLESS, Settings
from mlx_engine.models import standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, LayerTensors
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import EMBEDDINGS, Row, padded, stem_of, tensors

ARCHITECTURES = ("gemma3", "gemma3_text")
GGUF_ARCHITECTURE = "gemma3"

# Every sixth layer is global, unless the file says otherwise.
PATTERN = 6
PATTERN_KEYS: dict[Naming, str] = {"gguf": "attention.sliding_window_pattern", "hf": "sliding_window_pattern"}
# The attention scale is (hidden_size / n_heads)**-0.5 in the 27B model, and head_dim**-0.5 in the other models.
# llama.cpp recognises the 27B model by this number of layers, and reads no key for the scale.
LAYERS_OF_27B = 62
# Keys next to `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS,
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "tie_word_embeddings",
    "vision_config",
    "vocab_size",  # repeats `vocab_size` of `text_config`; mlx-lm reads it here
}
# Prefixes of the text model's tensors in a Hugging Face folder: the prefix in text models, then the old and the new
# prefix in multimodal models.
STEMS = ("model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class AttentionScale(Setting):
    """The setting of the attention scale. config.json has `query_pre_attn_scalar`, which is `scale**-2`.

    No GGUF key is written, because llama.cpp reads no key for Gemma's scale. Instead, the query weights (Gemma 2) or
    the norm weights of queries (Gemma 3) are multiplied by `scale_factor` in GGUF files: `plan` sets `Row.times`.
    """

    layers_of_27b: int

    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        if naming == "hf":
            return float(s.number("query_pre_attn_scalar", 256) ** -0.5)
        return s.number("attention.scale", usual_scale(known, self.layers_of_27b))

    def to_hf(self, value: float, config: Any) -> Mapping[str, object]:
        found = value**-2
        return {"query_pre_attn_scalar": round(found) if isclose(found, round(found), rel_tol=CLOSE) else found}


def usual_scale(cfg: Any, layers_of_27b: int) -> float:
    """Return the attention scale of a GGUF file without a key for it."""
    per_head = cfg.hidden_size / cfg.n_heads if cfg.n_layers == layers_of_27b else cfg.head_dim
    return float(per_head**-0.5)


@dataclass(frozen=True)
class Sizes(ConfigBase):
    """The sizes whose keys and defaults are the same in Gemma 2 and Gemma 3."""

    activation: ClassVar[Activation] = "gelu"
    n_layers: int = whole("block_count", ("num_hidden_layers", 26), condition=believable)
    hidden_size: int = whole("embedding_length", ("hidden_size", 2304))
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 9216))
    n_heads: int = whole("attention.head_count", ("num_attention_heads", 8))
    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), ("num_key_value_heads", 4), condition=divides("n_heads")
    )
    head_dim: int = rotated_heads(256, 256)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))


@dataclass(frozen=True)
class Config(Sizes):
    """The sizes of a Gemma 3 model. Fields have the defaults of transformers, because a config.json may omit keys."""

    vocab_size: int = whole(("vocab_size", n_embeddings), ("vocab_size", 262_208))
    context_length: int = whole("context_length", ("max_position_embeddings", 131_072))
    rope: Rotation = rotation(theta=1e6, rules=("linear",), layers="full_attention")
    local_rope: Rotation = rotation(
        gguf="rope.freq_base_swa", hf="rope_local_base_freq", layers="sliding_attention", always=False
    )
    attention_scale: float = declared(AttentionScale(LAYERS_OF_27B))
    window: int = whole("attention.sliding_window", ("sliding_window", 4096))
    # The keys in PATTERN_KEYS have an interval n: every n-th layer is global.
    is_local: tuple[bool, ...] = layer_kinds(PATTERN, interval=PATTERN_KEYS)

    expected = Expected(
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


# Folders store norm weights minus 1; GGUF files store the norm weights.
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


class ScaledEmbeddings(Decoder):
    """A model whose embeddings are multiplied by the square root of the hidden size.

    transformers rounds this factor to bfloat16 if activations are bfloat16; here the factor is float32.
    """

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        return self.backend.scale(super().embed(ids, positions), self.config.hidden_size**0.5)


class Model(ScaledEmbeddings, standard.Model):
    def mixer(self, config: Any, t: LayerTensors, rope: Rope | None, window: int | None) -> Attention:
        return Attention.read(t, config, rope, Scores(config.attention_scale), window)


def plan(checkpoint: Checkpoint) -> Plan:
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    text = settings if checkpoint.naming == "gguf" else text_settings(settings)
    config = Config.read(text, checkpoint.naming, checkpoint.n_embeddings)
    if checkpoint.naming == "gguf":
        # The head is tied to the embedding table, but some files have a matrix for the head.
        config = padded(config, checkpoint, EMBEDDINGS)
        return Plan(config, tensors(config, TENSORS, "optional"))
    stem = stem_of(checkpoint, STEMS)
    config = padded(config, checkpoint, f"{stem}embed_tokens.weight")
    table = {name: replace(row, hf=row.hf.replace(STEMS[0], stem)) for name, row in TENSORS.items()}
    factor = scale_factor(config, LAYERS_OF_27B)
    table[QUERY_NORM] = replace(table[QUERY_NORM], times=factor)
    # Tensors of the folder that are not read: the head (a copy of the embedding table), and the vision model.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    if text is not settings:
        unused += [name for name in checkpoint.shapes if "vision_tower." in name or "multi_modal_projector." in name]
    in_tensors = () if factor == 1 else ("attention_scale",)
    return Plan(config, tensors(config, table, "absent"), tuple(unused), in_tensors)


def text_settings(s: Settings, around: Collection[str] = AROUND_TEXT) -> Settings:
    """Return the settings of the text model: `text_config` in multimodal models, otherwise s itself.

    Raises:
        UnsupportedConfigError: there is a setting next to `text_config` whose key is not in `around`.
    """
    text = s.mapping("text_config")
    if text is None:
        return s
    s.refuse_rest(around)
    return text


def scale_factor(cfg: Any, layers_of_27b: int) -> float:
    """Return the factor by which a GGUF file scales queries: the model's attention scale divided by `usual_scale`."""
    factor = cfg.attention_scale / usual_scale(cfg, layers_of_27b)
    return 1.0 if isclose(factor, 1.0, rel_tol=CLOSE) else factor
