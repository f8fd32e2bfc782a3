"""Solar Open, such as Solar-Open-100B.

Reference: Hugging Face transformers, models/solar_open. Differences from GLM-4.5: no layer is dense, heads are rotated
as a whole and not normed. GGUF files have GLM-4.5's architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected, constant, whole
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import glm4_moe, standard

ARCHITECTURES = ("solar_open",)
GGUF_ARCHITECTURE = "glm4moe"


@dataclass(frozen=True)
class Config(glm4_moe.Config):
    """GLM-4.5's sizes. `intermediate_size` is read but unused: no layer is dense."""

    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 10240))
    rope: Rotation = rotation(theta=1e6, rules=("linear", "dynamic", "yarn"), partial=True)
    use_qk_norm: bool = constant(False)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1280))
    n_dense: int = constant(0)

    expected = Expected(
        hf={**glm4_moe.Config.expected.hf, "use_qk_norm": False, "first_k_dense_replace": 0},
        harmless=glm4_moe.Config.expected.harmless,
    )


TENSORS = glm4_moe.TENSORS
Model = standard.Model
plan = standard.plan(Config, TENSORS, experts_of=glm4_moe.NAMES)
