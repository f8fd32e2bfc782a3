"""Gemma 3, the text model.

Paper: "Gemma 3 Technical Report", arXiv 2503.19786. Reference: Hugging Face transformers, models/gemma3. Different from
Llama: what attention and the feed-forward network add is normed too, four norms a layer; queries and keys are normed
per head; most layers see a window of the latest tokens, some see all, and the two rotate with different bases; GELU in
the gate; the embedding is scaled by the square root of its width; the head is the embedding table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Activation, Array, LlamaLayer, RMSNorm, Rope, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.gemma3_config import Config, config_from_gguf, config_from_hf, text_settings
from mlx_engine.models.parameters import Parameters, Plan, Stored, Tensor
from mlx_engine.models.settings import Settings

# What a Hugging Face folder may call the text model: alone, or beside a model of images, older and newer.
STEMS = ("model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True, kw_only=True)
class Layer(LlamaLayer):
    """What attention and the feed-forward network add is normed."""

    post_attention_norm: RMSNorm
    post_ffw_norm: RMSNorm
    activation: Activation = "gelu"


class Model(Decoder):
    """Local layers see a window and have a rotation of their own; embeddings are scaled."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        everywhere = Rope.plain(config.head_dim, config.rope_theta, config.rope_factor)
        nearby = Rope.plain(config.head_dim, config.local_rope_theta)
        layers = [
            _layer(parameters, config.norm_eps, f"blk.{i}.", nearby, config.window)
            if is_local
            else _layer(parameters, config.norm_eps, f"blk.{i}.", everywhere, None)
            for i, is_local in enumerate(config.is_local)
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


def _layer(p: Parameters, eps: float, blk: str, rope: Rope, window: int | None) -> Layer:
    return Layer(
        attn_norm=p.rms_norm(blk + "attn_norm", eps),
        attn_q=p.linear(blk + "attn_q"),
        attn_k=p.linear(blk + "attn_k"),
        attn_v=p.linear(blk + "attn_v"),
        attn_q_norm=p.rms_norm(blk + "attn_q_norm", eps),
        attn_k_norm=p.rms_norm(blk + "attn_k_norm", eps),
        attn_output=p.linear(blk + "attn_output"),
        post_attention_norm=p.rms_norm(blk + "post_attention_norm", eps),
        ffn_norm=p.rms_norm(blk + "ffn_norm", eps),
        ffn_gate=p.linear(blk + "ffn_gate"),
        ffn_up=p.linear(blk + "ffn_up"),
        ffn_down=p.linear(blk + "ffn_down"),
        post_ffw_norm=p.rms_norm(blk + "post_ffw_norm", eps),
        rope=rope,
        window=window,
    )


def plan(checkpoint: Checkpoint) -> Plan:
    """The sizes and tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        config = config_from_gguf(settings, checkpoint.n_embeddings)
        # The head is tied, but a file may have a matrix for it all the same.
        head = Tensor("output.weight", "lm_head.weight", (config.vocab_size, config.hidden_size), required=False)
        return Plan(config, [*tensors(config, STEMS[0]), head])
    text = text_settings(settings)
    config = config_from_hf(text)
    stem = next((stem for stem in STEMS if f"{stem}embed_tokens.weight" in checkpoint.shapes), STEMS[0])
    # The head once more, and what reads images.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    if text is not settings:
        unused += [name for name in checkpoint.shapes if "vision_tower." in name or "multi_modal_projector." in name]
    return Plan(config, tensors(config, stem), tuple(unused))


def tensors(cfg: Config, stem: str) -> list[Tensor]:
    """The tensors of a model of these sizes, under GGUF's names and under transformers' behind `stem`."""
    D, F, E = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    H, K, V = cfg.n_heads * E, cfg.n_kv_heads * E, cfg.vocab_size
    norms = {
        "attn_norm": ("input_layernorm", D),
        "attn_q_norm": ("self_attn.q_norm", E),
        "attn_k_norm": ("self_attn.k_norm", E),
        "post_attention_norm": ("post_attention_layernorm", D),
        "ffn_norm": ("pre_feedforward_layernorm", D),
        "post_ffw_norm": ("post_feedforward_layernorm", D),
    }
    linears = {
        "attn_q": ("self_attn.q_proj", (H, D)),
        "attn_k": ("self_attn.k_proj", (K, D)),
        "attn_v": ("self_attn.v_proj", (K, D)),
        "attn_output": ("self_attn.o_proj", (D, H)),
        "ffn_gate": ("mlp.gate_proj", (F, D)),
        "ffn_up": ("mlp.up_proj", (F, D)),
        "ffn_down": ("mlp.down_proj", (D, F)),
    }
    table = [
        Tensor("token_embd.weight", f"{stem}embed_tokens.weight", (V, D)),
        _norm("output_norm", f"{stem}norm", D),
    ]
    for i in range(cfg.n_layers):
        blk, layer = f"blk.{i}.", f"{stem}layers.{i}."
        table += [_norm(blk + name, layer + hf, width) for name, (hf, width) in norms.items()]
        table += [Tensor(f"{blk}{name}.weight", f"{layer}{hf}.weight", shape) for name, (hf, shape) in linears.items()]
    return table


def _norm(name: str, hf: str, width: int) -> Tensor:
    """A gain, of which transformers stores what it is above 1; in GGUF the 1 has been added."""
    return Tensor(f"{name}.weight", Stored(f"{hf}.weight", plus=1.0), (width,))
