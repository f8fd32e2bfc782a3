"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, dense.

Papers: "Phi-3 Technical Report", arXiv 2404.14219; "Phi-4-Mini Technical Report", arXiv 2503.01743. Reference: Hugging
Face transformers, models/phi3. Differences from Llama: files store the projections of queries, keys and values as one
matrix, and the FFN's projections gate and up as another; some releases have the RoPE scaling rule LongRoPE; some have
sliding-window attention, which llama.cpp ignores; in Phi-4-mini, RoPE rotates only the first three quarters of each
head.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, partly_rotated_heads, whole_or_zero
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("phi3",)
GGUF_ARCHITECTURE = "phi3"


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = partly_rotated_heads()
    rope: Rotation = rotation(rules=("longrope",), partial=True)
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 0))

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu",
            **llama.NO_BIAS,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
        harmless=("embd_pdrop", "resid_pdrop"),
    )


QKV = ("model.layers.*.self_attn.qkv_proj.weight", "blk.*.attn_qkv.weight")
GATE_UP = ("model.layers.*.mlp.gate_up_proj.weight", "blk.*.ffn_up.weight")
TENSORS = {
    **llama.TENSORS,
    "blk.*.attn_q.weight": Row(QKV[0], "HE D", gguf=QKV[1], after=("GE", "GE"), rotated="H"),
    "blk.*.attn_k.weight": Row(QKV[0], "GE D", gguf=QKV[1], before=("HE",), after=("GE",), rotated="G"),
    "blk.*.attn_v.weight": Row(QKV[0], "GE D", gguf=QKV[1], before=("HE", "GE")),
    "blk.*.ffn_gate.weight": Row(GATE_UP[0], "F D", gguf=GATE_UP[1], after=("F",)),
    "blk.*.ffn_up.weight": Row(GATE_UP[0], "F D", gguf=GATE_UP[1], before=("F",)),
}


Model = standard.Model
plan = standard.plan(Config, TENSORS)
