"""The tensors of Qwen3.5: their names, and the order of their rows in folders and in GGUF files.

The model has the order of GGUF files: value head h of a delta net reads key head h % G, with G key heads. Folders have
the value heads of a key head side by side. A head of attention has its rotated elements first in each half, so that
backends rotate whole heads; both kinds of files have them in the first elements of the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table, stem_of

ATTENTION, DELTA = "full_attention", "linear_attention"
# Prefixes of the text model's tensors in a folder: text only, with images, and as mlx-lm writes them.
STEMS = ("model.", "model.language_model.", "language_model.model.")
LAYER = "model.layers.*."
NET = f"{LAYER}linear_attn."
HEAD = "lm_head.weight"

# Tensors of every model, beside those of attention and of delta nets.
EVERYWHERE = {
    "token_embd.weight": Row("model.embed_tokens.weight", "V D"),
    "output_norm.weight": Row("model.norm.weight", "D", plus=1.0),
    "output.weight": Row(HEAD, "V D"),
    "blk.*.attn_norm.weight": Row(f"{LAYER}input_layernorm.weight", "D", plus=1.0),
    "blk.*.ffn_norm.weight": Row(
        f"{LAYER}post_attention_layernorm.weight", "D", plus=1.0, gguf="blk.*.post_attention_norm.weight"
    ),
}
DENSE = {
    "blk.*.ffn_gate.weight": Row(f"{LAYER}mlp.gate_proj.weight", "F D"),
    "blk.*.ffn_up.weight": Row(f"{LAYER}mlp.up_proj.weight", "F D"),
    "blk.*.ffn_down.weight": Row(f"{LAYER}mlp.down_proj.weight", "D F"),
}


def value_heads_dealt(n_key_heads: int, n_value_heads: int) -> tuple[int, ...]:
    """Return the value heads of a folder in the model's order."""
    return tuple(h % n_key_heads * (n_value_heads // n_key_heads) + h // n_key_heads for h in range(n_value_heads))


def _rows(
    heads: tuple[int, ...] | range, apart: int, elements: tuple[int, ...] | range, first: int = 0
) -> tuple[int, ...]:
    """Return the rows of these elements of each head; heads are `apart` rows apart and begin at row `first`."""
    return tuple(first + head * apart + e for head in heads for e in elements)


def table(cfg: Any, checkpoint: Checkpoint, *, is_dense: bool) -> Table:
    """Return the tensor table of a checkpoint, with the FFN if it is dense."""
    conv = next((shape for name, shape in checkpoint.shapes.items() if name.endswith("conv1d.weight")), (0, 0, 0))
    # mlx-lm writes the convolutions with another order of axes, and adds 1 to norm weights.
    is_mlx = checkpoint.naming == "hf" and conv[-1] == 1 and cfg.conv_width > 1
    found = {**EVERYWHERE, **(DENSE if is_dense else {}), **_attention(cfg), **_delta(cfg, is_mlx=is_mlx)}
    if is_mlx:
        found = {name: replace(row, plus=0.0) for name, row in found.items()}
    stem = stem_of(checkpoint, STEMS)
    head = f"language_model.{HEAD}" if f"language_model.{HEAD}" in checkpoint.shapes else HEAD
    return {
        name: replace(row, hf=head if row.hf == HEAD else row.hf.replace(STEMS[0], stem, 1))
        for name, row in found.items()
    }


def _attention(cfg: Any) -> dict[str, Row]:
    """Return the rows of attention: the gate's rows lie behind the query's, head by head."""
    E, H, kind = cfg.head_dim, cfg.n_heads, ATTENTION
    both = (0, 2 * H * E)
    queries = TensorLayout("", rows=both, order=_rows(range(H), 2 * E, range(E)))
    gates = TensorLayout("", rows=both, order=_rows(range(H), 2 * E, range(E), first=E))
    name = f"{LAYER}self_attn."
    return {
        "blk.*.attn_q.weight": Row(f"{name}q_proj.weight", "HE D", kind=kind, rotated="H", stored=queries),
        "blk.*.attn_gate.weight": Row(
            f"{name}q_proj.weight", "HE D", kind=kind, gguf="blk.*.attn_q.weight", stored=gates
        ),
        "blk.*.attn_k.weight": Row(f"{name}k_proj.weight", "GE D", kind=kind, rotated="G"),
        "blk.*.attn_v.weight": Row(f"{name}v_proj.weight", "GE D", kind=kind),
        "blk.*.attn_q_norm.weight": Row(f"{name}q_norm.weight", "E", kind=kind, plus=1.0, rotated="1"),
        "blk.*.attn_k_norm.weight": Row(f"{name}k_norm.weight", "E", kind=kind, plus=1.0, rotated="1"),
        "blk.*.attn_output.weight": Row(f"{name}o_proj.weight", "D HE", kind=kind),
    }


def _delta(cfg: Any, *, is_mlx: bool) -> dict[str, Row]:
    """Return the rows of a delta net."""
    P, C, W, kind = cfg.value_dim, cfg.conv_channels, cfg.conv_width, DELTA
    dealt, keys = value_heads_dealt(cfg.n_key_heads, cfg.n_value_heads), 2 * cfg.n_key_heads * cfg.key_dim
    is_same = dealt == tuple(range(len(dealt)))
    heads = TensorLayout("", order=None if is_same else dealt)
    values = replace(heads, order=None if is_same else _rows(dealt, P, range(P)))
    channels = replace(heads, order=None if is_same else (*range(keys), *_rows(dealt, P, range(P), first=keys)))
    out = TensorLayout("", columns=None if is_same else (dealt, P))
    return {
        "blk.*.attn_qkv.weight": Row(f"{NET}in_proj_qkv.weight", "C D", kind=kind, in_hf=channels),
        "blk.*.delta_gate.weight": Row(
            f"{NET}in_proj_z.weight", "UP D", kind=kind, in_hf=values, gguf="blk.*.attn_gate.weight"
        ),
        "blk.*.ssm_beta.weight": Row(f"{NET}in_proj_b.weight", "U D", kind=kind, in_hf=heads),
        "blk.*.ssm_alpha.weight": Row(f"{NET}in_proj_a.weight", "U D", kind=kind, in_hf=heads),
        "blk.*.ssm_conv1d.weight": Row(
            f"{NET}conv1d.weight", "C W", kind=kind,
            in_hf=replace(channels, outer=(C, W, 1) if is_mlx else (C, 1, W)),
        ),
        "blk.*.ssm_dt.bias": Row(f"{NET}dt_bias", "U", kind=kind, in_hf=heads),
        "blk.*.ssm_a": Row(f"{NET}A_log", "U", kind=kind, in_hf=replace(heads, is_log=True)),
        "blk.*.ssm_norm.weight": Row(f"{NET}norm.weight", "P", kind=kind),
        "blk.*.ssm_out.weight": Row(f"{NET}out_proj.weight", "D UP", kind=kind, in_hf=out),
    }  # fmt: skip
