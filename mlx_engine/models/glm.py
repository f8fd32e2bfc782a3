"""GLM-4, such as GLM-4-9B-Chat-HF and GLM-Edge; GLM-4-0414, such as GLM-4-9B-0414 and GLM-Z1-32B-0414.

Reference: Hugging Face transformers, models/glm. Differences from Llama: RoPE rotates the first half of each head, with
the pairs (2j, 2j + 1); queries, keys and values have biases; files store gate and up as one matrix.

Reference of GLM-4-0414: models/glm4. Difference from GLM-4: the outputs of attention and FFN are normed, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, number, partly_rotated_heads, said
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, phi3, standard
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.table import Row


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = partly_rotated_heads(128)
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1.5625e-7))
    rope: Rotation = rotation(partial=True, part=0.5)
    attention_bias: bool = said(("attention_bias", True))

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", "mlp_bias": False})


TENSORS = {
    **{name: row for name, row in llama.TENSORS.items() if name != "blk.*.attn_output.bias"},
    **llama.INTERLEAVED,
    **{name: phi3.TENSORS[name] for name in ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight")},
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)


GLM4_TENSORS = {
    **TENSORS,
    "blk.*.post_attention_norm.weight": Row("model.layers.*.post_self_attn_layernorm.weight", "D"),
    "blk.*.post_ffw_norm.weight": Row("model.layers.*.post_mlp_layernorm.weight", "D"),
}
glm4_plan = standard.plan(Config, GLM4_TENSORS)
ARCHITECTURES = (
    Architecture("GLM-4, such as GLM-4-9B-Chat-HF and GLM-Edge", ("glm", "chatglm"), "chatglm", Config, Model, plan),
    Architecture("GLM-4-0414, such as GLM-4-9B-0414 and GLM-Z1-32B-0414", ("glm4",), "glm4", Config, Model, glm4_plan),
)
