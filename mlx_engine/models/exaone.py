"""EXAONE 3.0, 3.5 and Deep.

Paper: "EXAONE 3.5", arXiv 2412.04862. Reference: Hugging Face transformers, models/exaone. The layers are Llama's;
settings and tensors have other names.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, believable, number, whole
from mlx_engine.config.rope import EVERY_RULE, Rotation, rotation
from mlx_engine.models import llama, standard

ARCHITECTURES = ("exaone",)
GGUF_ARCHITECTURE = "exaone"


@dataclass(frozen=True)
class Config(llama.Config):
    n_layers: int = whole("block_count", "num_layers", condition=believable)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("layer_norm_epsilon", 1e-5))
    rope: Rotation = rotation(theta=500_000.0, rules=EVERY_RULE)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={"activation_function": "silu", **llama.NO_BIAS},
        harmless=("embed_dropout",),
    )


NAMES = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn.attention", "o_proj": "out_proj",
    "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
}  # fmt: skip
TENSORS = llama.renamed({name: row for name, row in llama.TENSORS.items() if "bias" not in name}, NAMES)
Model = standard.Model
# Maps each setting's name in Llama, which newer versions of transformers write, to the name in EXAONE.
ALIASES = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
plan = standard.plan(Config, TENSORS, aliases=ALIASES)
