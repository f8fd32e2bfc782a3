"""Qwen3, dense.

Paper: "Qwen3 Technical Report", arXiv 2505.09388. Reference: Hugging Face transformers, models/qwen3.
Different from Llama: queries and keys are RMS-normed per head before they are rotated; the head width is a setting
of its own, not hidden_size / n_heads; small sizes tie the head to the embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import LlamaLayer, Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.parameters import Parameters, Plan, Tensor
from mlx_engine.models.settings import HF_HARMLESS, MOST_LAYERS, Settings


@dataclass(frozen=True)
class Config:
    """The sizes of a Qwen3."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float


class Model(Decoder):
    """Llama's layers, with a norm of each query and key head."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope = Rope.plain(config.head_dim, config.rope_theta)
        layers = [_layer(parameters, config, rope, f"blk.{i}.") for i in range(config.n_layers)]
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, scale=config.head_dim**-0.5
        )


def _layer(p: Parameters, cfg: Config, rope: Rope, blk: str) -> LlamaLayer:
    return LlamaLayer(
        attn_norm=p.rms_norm(blk + "attn_norm", cfg.norm_eps),
        attn_q=p.linear(blk + "attn_q"),
        attn_k=p.linear(blk + "attn_k"),
        attn_v=p.linear(blk + "attn_v"),
        attn_q_norm=p.rms_norm(blk + "attn_q_norm", cfg.norm_eps),
        attn_k_norm=p.rms_norm(blk + "attn_k_norm", cfg.norm_eps),
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
        return Plan(config, tensors(config, head="optional"))
    config = _config_from_hf(settings)
    if not settings.flag("tie_word_embeddings", False):
        return Plan(config, tensors(config, head="required"))
    # A tied head needs no matrix of its own, but some files carry it all the same.
    return Plan(config, tensors(config, head="absent"), unused=("lm_head.weight",))


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
        rope_theta=s.number("rope.freq_base", 10_000.0),
    )
    s.expect("attention.value_length", head_dim)
    s.expect("rope.dimension_count", head_dim)
    s.expect("rope.scaling.type", "none")
    s.expect("attention.causal", True)
    s.expect("expert_count", 0)
    s.refuse_rest()
    return _sound(config, s)


def _config_from_hf(s: Settings) -> Config:
    # transformers 5 moved the rotation's settings into a mapping of their own.
    rope = s.mapping("rope_parameters") or s
    config = Config(
        n_layers=s.whole("num_hidden_layers"),
        hidden_size=s.whole("hidden_size"),
        intermediate_size=s.whole("intermediate_size"),
        n_heads=s.whole("num_attention_heads"),
        n_kv_heads=s.whole("num_key_value_heads"),
        head_dim=s.whole("head_dim", 128),
        vocab_size=s.whole("vocab_size"),
        context_length=s.whole("max_position_embeddings"),
        norm_eps=s.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", 10_000.0),
    )
    rope.expect("rope_type", "default")
    if rope is not s:
        rope.refuse_rest()
    s.expect("rope_scaling", None)
    s.expect("hidden_act", "silu")
    s.expect("attention_bias", False)
    s.expect("use_sliding_window", False)
    s.words("layer_types", config.n_layers, "full_attention")
    s.refuse_rest({*HF_HARMLESS, "sliding_window", "max_window_layers", "tie_word_embeddings"})
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
    D, F, E = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    H, K, V = cfg.n_heads * E, cfg.n_kv_heads * E, cfg.vocab_size
    layer = {
        "attn_norm": ("input_layernorm", (D,)),
        "attn_q": ("self_attn.q_proj", (H, D)),
        "attn_k": ("self_attn.k_proj", (K, D)),
        "attn_v": ("self_attn.v_proj", (K, D)),
        "attn_q_norm": ("self_attn.q_norm", (E,)),
        "attn_k_norm": ("self_attn.k_norm", (E,)),
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
    if head != "absent":
        table.append(Tensor("output.weight", "lm_head.weight", (V, D), required=head == "required"))
    for i in range(cfg.n_layers):
        table += [
            Tensor(f"blk.{i}.{gguf}.weight", f"model.layers.{i}.{hf}.weight", shape)
            for gguf, (hf, shape) in layer.items()
        ]
    return table
