"""The types of linear layers, by GGUF names, and their groups: options of quantisation name them."""

from __future__ import annotations

# Layer types, by GGUF names. A head that is tied to the embedding table also counts as `output`.
GROUPS = {
    # GGUF files of GPT-2 have attn_qkv in place of attn_q, attn_k and attn_v; the loaded model has the three.
    "attention": ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate"),
    # The projections of layers with a state; `in_proj` of LFM2 is loaded in three parts.
    "mixer": (
        "in_gate",
        "out_gate",
        "value",
        "in_proj",
        "out_proj",
        "delta_gate",
        "ssm_alpha",
        "ssm_beta",
        "ssm_in",
        "ssm_out",
    ),
    # The experts of a layer are one layer type; routers (ffn_gate_inp) have none, because they are never quantised.
    # Some GGUF files have gate and up of all experts in one tensor; the loaded model has the two.
    "ffn": (
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_gate_up_exps",
        "ffn_down_exps",
        "ffn_gate_shexp",
        "ffn_up_shexp",
        "ffn_down_shexp",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ),
    # The inputs of single layers in Gemma 4, and their embedding table.
    "per_layer": ("inp_gate", "proj", "per_layer_model_proj", "per_layer_token_embd"),
}


HEAD = "output"


LAYER_TYPES = (*(name for group in GROUPS.values() for name in group), HEAD)


def layer_type(name: str) -> str:
    """Return the layer type of a name: "attn_q" for "blk.0.attn_q" and for "blk.0.attn_q.weight".

    A number at the end is that of an expert: "ffn_up_exps" for "blk.0.ffn_up_exps.3".
    """
    *_, before, last = ("", *name.removesuffix(".weight").split("."))
    stem = before if last.isdigit() else last
    return HEAD if stem == "token_embd" else stem
