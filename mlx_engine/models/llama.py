"""Llama 2 and 3, and models with the same architecture, such as TeleChat3; Code World Model (CWM).

Papers: "Llama 2", arXiv 2307.09288; "The Llama 3 Herd of Models", arXiv 2407.21783. Reference: Hugging Face
transformers, models/llama. A layer has RMS norms before attention and before a gated FFN, rotary embedding of queries
and keys, and grouped-query attention. Llama 3 lowers the low rotary frequencies for longer contexts (rule "llama3" in
`config/rope.py`). Most other model files import this config and tensor table, and change some fields and rows.

Paper of CWM: "CWM: An Open-Weights LLM for Research on Code Generation with World Models", arXiv 2510.02387. Reference:
models/cwm. Difference from Llama 3: three of four layers have sliding-window attention. llama.cpp has no
architecture for CWM. In this project's GGUF files of CWM, the rows of queries and keys are ordered as in folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    divides,
    each_layer,
    n_embeddings,
    n_layers,
    number,
    one_per_head,
    rotated_heads,
    said,
    whole,
    whole_or_zero,
)
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.models import standard
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, Table


@dataclass(frozen=True)
class Config(ConfigBase):
    n_layers: int = n_layers()
    hidden_size: int = whole("embedding_length", "hidden_size")
    intermediate_size: int = whole("feed_forward_length", "intermediate_size")
    n_heads: int = whole("attention.head_count", "num_attention_heads")
    n_kv_heads: int = whole(
        ("attention.head_count_kv", one_per_head), ("num_key_value_heads", one_per_head), condition=divides("n_heads")
    )
    head_dim: int = rotated_heads()
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    # 2,048 is transformers' default. Files of the first Llama have only `max_sequence_length`, which transformers does
    # not read.
    context_length: int = whole("context_length", ("max_position_embeddings", 2048))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))
    rope: Rotation = rotation(rules=EVERY_RULE)
    attention_bias: bool = said(("attention_bias", False))
    mlp_bias: bool = said(("mlp_bias", False))

    expected = Expected(
        gguf={
            "attention.causal": True,
            "expert_count": 0,
            "expert_used_count": 0,
            "tensor_data_layout": "Meta AI original pth",
        },
        hf={"hidden_act": "silu", "layer_types": each_layer("full_attention")},
        harmless=("max_sequence_length", "max_window_layers", "model_max_length"),  # transformers does not read them
    )

    @property
    def rotary_dim(self) -> int:
        """The number of elements of each head that are rotated."""
        return self.rope.n_rotated or self.head_dim


TENSORS = {
    "token_embd.weight": Row("model.embed_tokens.weight", "V D"),
    "output_norm.weight": Row("model.norm.weight", "D"),
    "output.weight": Row("lm_head.weight", "V D"),
    "blk.*.attn_norm.weight": Row("model.layers.*.input_layernorm.weight", "D"),
    "blk.*.attn_q.weight": Row("model.layers.*.self_attn.q_proj.weight", "HE D"),
    "blk.*.attn_k.weight": Row("model.layers.*.self_attn.k_proj.weight", "GE D"),
    "blk.*.attn_v.weight": Row("model.layers.*.self_attn.v_proj.weight", "GE D"),
    "blk.*.attn_output.weight": Row("model.layers.*.self_attn.o_proj.weight", "D HE"),
    "blk.*.ffn_norm.weight": Row("model.layers.*.post_attention_layernorm.weight", "D"),
    "blk.*.ffn_gate.weight": Row("model.layers.*.mlp.gate_proj.weight", "F D"),
    "blk.*.ffn_up.weight": Row("model.layers.*.mlp.up_proj.weight", "F D"),
    "blk.*.ffn_down.weight": Row("model.layers.*.mlp.down_proj.weight", "D F"),
    "blk.*.attn_q.bias": Row("model.layers.*.self_attn.q_proj.bias", "HE", when="attention_bias"),
    "blk.*.attn_k.bias": Row("model.layers.*.self_attn.k_proj.bias", "GE", when="attention_bias"),
    "blk.*.attn_v.bias": Row("model.layers.*.self_attn.v_proj.bias", "GE", when="attention_bias"),
    "blk.*.attn_output.bias": Row("model.layers.*.self_attn.o_proj.bias", "D", when="attention_bias"),
    "blk.*.ffn_gate.bias": Row("model.layers.*.mlp.gate_proj.bias", "F", when="mlp_bias"),
    "blk.*.ffn_up.bias": Row("model.layers.*.mlp.up_proj.bias", "F", when="mlp_bias"),
    "blk.*.ffn_down.bias": Row("model.layers.*.mlp.down_proj.bias", "D", when="mlp_bias"),
}
# Settings for architectures without biases: config.json may have them, but only with the value False.
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
# In GGUF files of "llama" and of some other architectures, the rows of each query and key head are permuted, so that
# rotary pairs are (2j, 2j + 1). In folders and in this engine, pairs are (j, j + E/2), where E is the head dim. These
# table rows undo the permutation of GGUF files.
PERMUTED = {
    name: replace(TENSORS[name], heads=heads)
    for part, heads in (("attn_q", "H"), ("attn_k", "G"))
    for name in (f"blk.*.{part}.weight", f"blk.*.{part}.bias")
}
# Table rows for architectures whose rotary pairs are (2j, 2j + 1) in GGUF files and in folders. The rows of each head
# are reordered on load.
INTERLEAVED = {
    name: replace(TENSORS[name], rotated=heads, interleaved=True)
    for part, heads in (("attn_q", "H"), ("attn_k", "G"))
    for name in (f"blk.*.{part}.weight", f"blk.*.{part}.bias")
}
# Table rows for architectures that rotate only the first n rows of each head, and whose files have the pairs
# (j, j + n/2). The rows of each head are reordered on load.
PARTLY_ROTATED = {name: replace(row, interleaved=False) for name, row in INTERLEAVED.items()}
# The biases of layer norms, for architectures that have them.
NORM_BIASES = {
    name.replace("weight", "bias"): replace(row, hf=row.hf.replace("weight", "bias"))
    for name, row in TENSORS.items()
    if "norm" in name
}


def renamed(table: Table, names: Mapping[str, str]) -> dict[str, Row]:
    """Return the table with other Hugging Face names: in each name, `names` maps each old part to the new part."""
    made = dict(table)
    for part, other in names.items():
        made = {name: replace(row, hf=row.hf.replace(part, other)) for name, row in made.items()}
    return made


def dense_first(table: Table) -> dict[str, Row]:
    """Return the table with its FFN matrices only in dense layers, for models whose other layers have experts."""
    return {name: replace(row, kind="dense") if row.shape in ("F D", "D F") else row for name, row in table.items()}


Model = standard.Model
plan = standard.plan(Config, TENSORS | PERMUTED)

# The rotary settings of CWM if config.json has none.
CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True)
class CwmConfig(Config):
    """Llama's settings. In local layers, a token attends to the last `window` tokens.

    If `window` is 0, no layer is local.
    """

    context_length: int = whole("context_length", ("max_position_embeddings", 131_072))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-5))
    rope: Rotation = rotation(theta=1e6, rules=EVERY_RULE)
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 8192))
    is_local: tuple[bool, ...] = layer_kinds(
        4, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True, begins=True
    )

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", **NO_BIAS})


_cwm_plan = standard.plan(CwmConfig, TENSORS)


def cwm_plan(checkpoint: Checkpoint) -> Plan:
    s = checkpoint.settings
    if checkpoint.naming == "hf" and not (s.get("rope_parameters") or s.get("rope_scaling")):
        checkpoint = replace(checkpoint, settings={**s, "rope_parameters": CWM_ROPE})
    return _cwm_plan(checkpoint)


ARCHITECTURES = (
    Architecture("Llama 2 and 3, and models with the same architecture", ("llama",), "llama", Config, Model, plan),
    Architecture("TeleChat3, dense, such as TeleChat3-36B-Thinking", ("telechat3",), "llama", Config, Model, plan),
    Architecture("Code World Model (CWM)", ("cwm",), "cwm", CwmConfig, Model, cwm_plan),
)
