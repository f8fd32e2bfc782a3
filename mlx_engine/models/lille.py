"""Lille 130M.

Reference: mlx-lm, models/lille-130m. Differences from Llama: rotary pairs are (2j, 2j + 1); folders have queries, keys
and values in one matrix; settings and tensors have other names. GGUF files have the architecture "llama".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlx_engine.config.declared import Expected, believable, divides, number, one_per_head, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Table

ARCHITECTURES = ("lille-130m",)
GGUF_ARCHITECTURE = "llama"


def ffn_size(known: Any) -> int:
    return 256 * round(int(8 * known.hidden_size / 3) / 256)


@dataclass(frozen=True)
class Config(llama.Config):
    n_layers: int = whole("block_count", "n_layer", condition=believable)
    hidden_size: int = whole("embedding_length", "n_embd")
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", ffn_size))
    n_heads: int = whole("attention.head_count", "n_head")
    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), ("n_kv_heads", one_per_head), condition=divides("n_heads")
    )
    context_length: int = whole("context_length", "block_size")
    norm_eps: float = number("attention.layer_norm_rms_epsilon", "layer_norm_eps")
    rope: Rotation = rotation()

    expected = Expected(hf=llama.NO_BIAS)


NAMES = {
    "model.": "transformer.", "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.out_proj",
    "input_layernorm": "attention.norm", "post_attention_layernorm": "feed_forward.norm", "mlp.": "feed_forward.",
}  # fmt: skip
QKV = "transformer.layers.*.attention.qkv_proj.weight"
USUAL = {name: row for name, row in (llama.TENSORS | llama.INTERLEAVED).items() if "bias" not in name}


def tensors(config: Any) -> Table:
    made, H, G, E = llama.renamed(USUAL, NAMES), config.n_heads, config.n_kv_heads, config.head_dim
    for name, first in (("attn_q", 0), ("attn_k", H), ("attn_v", H + G)):
        layout = TensorLayout("", rows=(first * E, (H + 2 * G) * E))
        made[f"blk.*.{name}.weight"] = replace(made[f"blk.*.{name}.weight"], hf=QKV, in_hf=layout)
    return made


Model = standard.Model
plan = standard.plan(Config, tensors, tied=True)
