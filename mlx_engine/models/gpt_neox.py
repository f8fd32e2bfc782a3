"""GPT-NeoX 20B and Pythia.

Paper: "GPT-NeoX-20B", arXiv 2204.06745. Reference: Hugging Face transformers, models/gpt_neox. Differences from Llama:
attention and FFN read the same hidden states (a parallel block) and have separate norms; norms are layer norms with
biases; the linear layers of attention and FFN have biases; files store queries, keys and values as one matrix; RoPE
rotates only a part of each head; the FFN has no gate, and its activation is GELU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_engine.backends.parameters import Activation
from mlx_engine.config.declared import Expected, activation_key, constant, number, partly_rotated_heads
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table

ARCHITECTURES = ("gpt_neox", "gptneox")
GGUF_ARCHITECTURE = "gptneox"


@dataclass(frozen=True)
class Config(llama.Config):
    layer_norms: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True
    head_dim: int = partly_rotated_heads()
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_eps", 1e-5))
    rope: Rotation = rotation(partial=True, part=0.25)
    activation: Activation = activation_key(
        {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}, gguf="gelu"
    )
    attention_bias: bool = constant(True)
    mlp_bias: bool = constant(True)

    expected = Expected(
        gguf={"attention.causal": True, "use_parallel_residual": True},
        hf={"attention_bias": True, "use_parallel_residual": True},
    )

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys, with `use_parallel_residual`, which llama.cpp requires."""
        return super().to_gguf() | {"use_parallel_residual": True}


NAMES = {
    "model.norm": "gpt_neox.final_layer_norm", "model.embed_tokens": "gpt_neox.embed_in", "lm_head": "embed_out",
    "model.": "gpt_neox.", "self_attn.o_proj": "attention.dense", "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}  # fmt: skip
USUAL = {name: row for name, row in (llama.TENSORS | llama.NORM_BIASES).items() if "gate" not in name}


def tensors(config: Any) -> Table:
    # In folders, the rows of `query_key_value` are the query, key and value of head 0, then those of head 1, and so on.
    # In GGUF files, the rows of all queries come first, then all keys, then all values.
    made = llama.renamed(USUAL, NAMES)
    for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
        order = tuple((3 * h + i) * config.head_dim + e for h in range(config.n_heads) for e in range(config.head_dim))
        for kind, shape in (("weight", "HE D"), ("bias", "HE")):
            made[f"blk.*.{name}.{kind}"] = Row(
                f"gpt_neox.layers.*.attention.query_key_value.{kind}", shape, gguf=f"blk.*.attn_qkv.{kind}",
                before=("HE",) * i, after=("HE",) * (2 - i), in_hf=TensorLayout("", order=order),
                rotated=None if name == "attn_v" else "H",
            )  # fmt: skip
    return made


Model = standard.Model
plan = standard.plan(Config, tensors, aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
