"""GLM-4-0414, such as GLM-4-9B and GLM-Z1-32B.

Reference: Hugging Face transformers, models/glm4. Difference from GLM-4: norms after attention and FFN, too.
"""

from __future__ import annotations

from mlx_engine.models import glm, standard
from mlx_engine.weights.table import Row

ARCHITECTURES = ("glm4",)
GGUF_ARCHITECTURE = "glm4"

Config = glm.Config
TENSORS = {
    **glm.TENSORS,
    "blk.*.post_attention_norm.weight": Row("model.layers.*.post_self_attn_layernorm.weight", "D"),
    "blk.*.post_ffw_norm.weight": Row("model.layers.*.post_mlp_layernorm.weight", "D"),
}
Model = standard.Model
plan = standard.plan(Config, TENSORS)
