"""InternLM2, InternLM2.5 and InternLM3.

Paper: "InternLM2 Technical Report", arXiv 2403.17297. Reference: mlx-lm, models/internlm2. The layers are Llama's;
folders have queries, keys and values in one matrix. For each KV head, the matrix has the rows of the query heads that
share this KV head, then its rows of keys, then its rows of values.

Reference of InternLM3: Hugging Face transformers, models/internlm3. The tensors are Llama's. In config.json, the
settings for biases have other names than Llama's. GGUF files have the architecture "llama".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mlx_engine.config.declared import Expected, rotated_heads, said
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Table


@dataclass(frozen=True)
class Config(llama.Config):
    rope: Rotation = rotation(rules=("linear", "dynamic"))
    attention_bias: bool = said(("bias", True))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", "mlp_bias": False})


NAMES = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
USUAL = llama.renamed(llama.TENSORS | llama.PERMUTED, NAMES)


def tensors(config: Any) -> Table:
    E, n = config.head_dim, config.n_heads // config.n_kv_heads
    made = dict(USUAL)
    parts: dict[str, tuple[Iterable[int], tuple[str, ...], tuple[str, ...]]] = {
        "attn_q": (range(n), (), ("GE", "GE")), "attn_k": ((n,), ("HE",), ("GE",)),
        "attn_v": ((n + 1,), ("HE", "GE"), ()),
    }  # fmt: skip
    for name, (heads, before, after) in parts.items():
        order = tuple((g * (n + 2) + h) * E + e for g in range(config.n_kv_heads) for h in heads for e in range(E))
        for kind in ("weight", "bias"):
            row, hf = USUAL[f"blk.*.{name}.{kind}"], f"model.layers.*.attention.wqkv.{kind}"
            made[f"blk.*.{name}.{kind}"] = replace(
                row, hf=hf, before=before, after=after, in_hf=TensorLayout("", order=order)
            )
    return made


Model = standard.Model
plan = standard.plan(Config, tensors)


def equal_biases(s: Settings, key: str, config: Any) -> None:
    """Check that attention and FFN both have biases, or that both have none."""
    if config.mlp_bias != config.attention_bias:
        raise s.error("bias", f"{config.attention_bias}, as qkv_bias", config.mlp_bias)


@dataclass(frozen=True)
class V3Config(llama.Config):
    head_dim: int = rotated_heads(128)
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    attention_bias: bool = said(("qkv_bias", False))
    mlp_bias: bool = said(("bias", False))

    expected = Expected(gguf=llama.Config.expected.gguf, hf={"hidden_act": "silu", "bias": equal_biases})


v3_plan = standard.plan(
    V3Config, llama.TENSORS | llama.PERMUTED, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"}
)
ARCHITECTURES = (
    Architecture("InternLM2 and InternLM2.5", ("internlm2",), "internlm2", Config, Model, plan),
    Architecture("InternLM3", ("internlm3",), "llama", V3Config, Model, v3_plan),
)
