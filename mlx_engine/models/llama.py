"""Llama 2 and 3, and what is built like them.

Papers: "Llama 2", arXiv 2307.09288; "The Llama 3 Herd of Models", arXiv 2407.21783. Reference: Hugging Face
transformers, models/llama. RMS norms before attention and before a gated feed-forward network, rotated queries and
keys, several query heads to a key/value head. Llama 3 slows down the slow rotations, so that more positions differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import LlamaLayer, Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import ModelError
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.parameters import Parameters, Plan, Stored, Tensor
from mlx_engine.models.rotation import rope_from_gguf, rope_from_hf
from mlx_engine.models.settings import HF_HARMLESS, MOST_LAYERS, Settings


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama, and how it rotates."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: Rope


class Model(Decoder):
    """Llama's layers."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope = _rope(parameters, config)
        layers = [_layer(parameters, config, rope, f"blk.{i}.") for i in range(config.n_layers)]
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, scale=config.head_dim**-0.5
        )


def _rope(p: Parameters, cfg: Config) -> Rope:
    """Llama 3's GGUF files say by what each frequency is divided, where others state a rule."""
    if "rope_freqs.weight" not in p:
        return cfg.rope
    factors = p.values("rope_freqs").tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError("rope_freqs.weight: expected finite numbers > 0, found others; download the file again")
    return Rope(tuple(f / factor for f, factor in zip(cfg.rope.frequencies, factors, strict=True)))


def _layer(p: Parameters, cfg: Config, rope: Rope, blk: str) -> LlamaLayer:
    return LlamaLayer(
        attn_norm=p.rms_norm(blk + "attn_norm", cfg.norm_eps),
        attn_q=p.linear(blk + "attn_q"),
        attn_k=p.linear(blk + "attn_k"),
        attn_v=p.linear(blk + "attn_v"),
        rope=rope,
        attn_output=p.linear(blk + "attn_output"),
        ffn_norm=p.rms_norm(blk + "ffn_norm", cfg.norm_eps),
        ffn_gate=p.linear(blk + "ffn_gate"),
        ffn_up=p.linear(blk + "ffn_up"),
        ffn_down=p.linear(blk + "ffn_down"),
    )


def plan(checkpoint: Checkpoint) -> Plan:
    """The sizes and tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        # GGUF does not say whether the head is tied: the file has a matrix for it, or it has none.
        config = _config_from_gguf(settings, checkpoint.n_embeddings)
        factors = Tensor("rope_freqs.weight", "", (config.head_dim // 2,), required=False)
        return Plan(config, [*tensors(config, head="optional"), factors])
    config = _config_from_hf(settings)
    # Old files carry the frequencies, which follow from the settings.
    unused = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.n_layers)]
    if not settings.flag("tie_word_embeddings", False):
        return Plan(config, tensors(config, head="required"), tuple(unused))
    # A tied head needs no matrix of its own, but some files carry it all the same.
    return Plan(config, tensors(config, head="absent"), (*unused, "lm_head.weight"))


def _config_from_gguf(s: Settings, vocab_size: int) -> Config:
    hidden_size, n_heads = s.whole("embedding_length"), s.whole("attention.head_count")
    head_dim = s.whole("attention.key_length", max(1, hidden_size // n_heads))
    config = Config(
        n_layers=s.whole("block_count"),
        hidden_size=hidden_size,
        intermediate_size=s.whole("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=s.whole("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        vocab_size=s.whole("vocab_size", vocab_size),
        context_length=s.whole("context_length"),
        norm_eps=s.number("attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(s, head_dim),
    )
    s.expect("attention.value_length", head_dim)
    s.expect("rope.dimension_count", head_dim)
    s.expect("attention.causal", True)
    s.expect("expert_count", 0)
    s.refuse_rest()
    return _sound(config, s)


def _config_from_hf(s: Settings) -> Config:
    hidden_size, n_heads = s.whole("hidden_size"), s.whole("num_attention_heads")
    head_dim = s.whole("head_dim", max(1, hidden_size // n_heads))
    config = Config(
        n_layers=s.whole("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=s.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=s.whole("num_key_value_heads", n_heads),
        head_dim=head_dim,
        vocab_size=s.whole("vocab_size"),
        context_length=s.whole("max_position_embeddings"),
        norm_eps=s.number("rms_norm_eps", 1e-6),
        rope=rope_from_hf(s, head_dim),
    )
    s.expect("hidden_act", "silu")
    s.expect("attention_bias", False)
    s.expect("mlp_bias", False)
    s.expect("rope_interleaved", False)
    s.refuse_rest({*HF_HARMLESS, "is_llama_config", "pretraining_tp", "tie_word_embeddings"})
    return _sound(config, s)


def _sound(config: Config, s: Settings) -> Config:
    if config.n_heads % config.n_kv_heads:
        raise s.error("n_heads", f"a multiple of the {config.n_kv_heads} key/value heads", config.n_heads)
    if config.n_layers > MOST_LAYERS:
        raise s.error("n_layers", f"at most {MOST_LAYERS:,}", config.n_layers)
    if config.head_dim % 2:
        raise s.error("head_dim", "an even number, for its halves are rotated against each other", config.head_dim)
    return config


def tensors(cfg: Config, *, head: Literal["required", "optional", "absent"]) -> list[Tensor]:
    """Every tensor of a checkpoint; without a matrix of its own the head is tied to the embedding table."""
    D, F, V = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    H, K = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    layer = {
        "attn_norm": ("input_layernorm", (D,)),
        "attn_q": ("self_attn.q_proj", (H, D)),
        "attn_k": ("self_attn.k_proj", (K, D)),
        "attn_v": ("self_attn.v_proj", (K, D)),
        "attn_output": ("self_attn.o_proj", (D, H)),
        "ffn_norm": ("post_attention_layernorm", (D,)),
        "ffn_gate": ("mlp.gate_proj", (F, D)),
        "ffn_up": ("mlp.up_proj", (F, D)),
        "ffn_down": ("mlp.down_proj", (D, F)),
    }
    table = [
        Tensor("token_embd.weight", "model.embed_tokens.weight", (V, D)),
        Tensor("output_norm.weight", "model.norm.weight", (D,)),
    ]
    # In GGUF their rows are dealt for a rotation of neighbours, (2j, 2j + 1); ours is of (j, j + E/2).
    heads = {"attn_q": cfg.n_heads, "attn_k": cfg.n_kv_heads}
    if head != "absent":
        table.append(Tensor("output.weight", "lm_head.weight", (V, D), required=head == "required"))
    for i in range(cfg.n_layers):
        for name, (hf, shape) in layer.items():
            stored = Stored(f"blk.{i}.{name}.weight", heads=heads.get(name))
            table.append(Tensor(stored.name, f"model.layers.{i}.{hf}.weight", shape, gguf=stored))
    return table
