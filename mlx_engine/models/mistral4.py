"""Mistral Small 4, the text model.

Reference: Hugging Face transformers, models/mistral4. Differences from DeepSeek-V2-Lite (`deepseek.py`): the router
chooses experts only from the groups of experts with the highest scores; with `norm_topk_prob`, the weights of a token's
experts add up to 1; queries are scaled by a factor that grows with the position (Llama 4's attention scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, declared, divides, flag, whole
from mlx_engine.config.rope import Rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import deepseek, llama, ministral3, standard
from mlx_engine.weights.experts import InGroups, Names, of_groups
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("mistral4",)
GGUF_ARCHITECTURE = "mistral4"


class Rotary(deepseek.Rotary):
    """The setting of the rotary embedding.

    If config.json has `partial_rotary_factor`, it must be rope_dim / (nope_dim + rope_dim).
    """

    def _scaled(self, s: Settings, r: Rotation, known: Any, original: int | None) -> Rotation:
        s.expect("partial_rotary_factor", known.rope_dim / (known.nope_dim + known.rope_dim))
        return super()._scaled(s, r, known, original)


ROTARY = Rotary(rules=("yarn",), grows=True)


@dataclass(frozen=True)
class Config(InGroups, deepseek.Config):
    rope: Rotation = declared(ROTARY)  # noqa: RUF009 - `declared` returns a dataclass field
    n_dense: int = declared(deepseek.DenseLayers(0))
    normalize: bool = flag(("expert_weights_norm", False), ("norm_topk_prob", True))  # type: ignore[misc]
    n_groups: int = whole(("expert_group_count", 1), ("n_group", 1), condition=divides("n_experts"))
    n_groups_used: int = whole(("expert_group_used_count", 1), ("topk_group", 1), condition=of_groups)

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 1, "attention.head_count_kv": deepseek.one_or_all},
        hf={
            "hidden_act": "silu", **llama.NO_BIAS, "num_key_value_heads": deepseek.one_or_all, "rope_interleave": True,
        },
        harmless=("head_dim", "qk_head_dim", "output_router_logits", "router_aux_loss_coef"),
    )  # fmt: skip


Model = deepseek.Model
NAMES = Names(shared="shared_experts")


def plan(checkpoint: Checkpoint) -> Plan:
    return ministral3.text_plan(checkpoint, of_text)


def of_text(checkpoint: Checkpoint, settings: Settings | None) -> Plan:
    made = deepseek.with_latents(decoder_plan(checkpoint, Config, deepseek.TENSORS, settings=settings), checkpoint)
    return standard.with_mixture(made, checkpoint, NAMES)
