"""The types of linear layers, by GGUF names, and their groups. Options of quantisation use these names."""

from __future__ import annotations

# Of latent attention; `attn_q`, `attn_q_b` and `attn_kv_a_mqa` are loaded in two parts. The matrices of single heads,
# attn_k_b and attn_v_b, have none: they keep their type.
_LATENT = ("attn_q_a", "attn_q_b", "attn_q_pe", "attn_kv_a_mqa", "attn_latent", "attn_k_pe")

# Layer types, by GGUF names. A head that is tied to the embedding table also counts as `output`.
GROUPS = {
    # GGUF files of GPT-2 have attn_qkv in place of attn_q, attn_k and attn_v; loaded models have all three.
    "attention": ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", *_LATENT),
    # The projections of layers with a state. `in_proj` of LFM2 is loaded in three parts, and `ssm_ba` and `ssm_in` of
    # Qwen3-Next in two.
    "mixer": (
        "in_gate",
        "out_gate",
        "value",
        "in_proj",
        "out_proj",
        "delta_gate",
        "ssm_alpha",
        "ssm_beta",
        "ssm_out",
        "ssm_ba",
        "ssm_in",
    ),
    # The experts of a layer are one layer type; routers (ffn_gate_inp) have none, because they are never quantised.
    # Some GGUF files have gate and up of all experts in one tensor; loaded models have two.
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
