"""Hunyuan with a mixture of experts, such as Hunyuan-A13B.

Reference: Hugging Face transformers, models/hunyuan_v1_moe. Difference from the dense Hunyuan: every FFN is a mixture
of experts, and an expert without a weight that all tokens share. In config.json a number may be a list of equal
numbers, one for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, declared, whole
from mlx_engine.config.settings import Settings
from mlx_engine.models import hunyuan_v1_dense, standard
from mlx_engine.weights.experts import Count, Names, Routed, of_all, with_experts, with_shared_expert
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("hunyuan_v1_moe", "hunyuan-moe")
GGUF_ARCHITECTURE = "hunyuan-moe"


def same_in_all(s: Settings, key: str, default: Any) -> int:
    """Return a number that config.json may have once or for each layer."""
    found = s.counts(key, s.whole("num_hidden_layers", 1))
    if found is None:
        return s.whole(key, default)
    if len(set(found)) != 1 or found[0] < 1:
        raise s.error(key, "one number >= 1 for all layers", found)
    return found[0]


def each(name: str, usual: int) -> Any:
    """Return a check that a number, which may be given for each layer, is that of the config's field `name`."""

    def check(s: Settings, key: str, config: Any) -> None:
        expected = getattr(config, name, usual)
        if (found := same_in_all(s, key, expected)) != expected:
            raise s.error(key, str(expected), found)

    return check


@dataclass(frozen=True)
class Config(Routed, hunyuan_v1_dense.Config):
    """Hunyuan's settings and the numbers of experts; `intermediate_size` is that of one expert."""

    normalize: ClassVar[bool] = True
    intermediate_size: int = whole(
        "expert_feed_forward_length", "intermediate_size",
        repeated=("feed_forward_length", "expert_shared_feed_forward_length"),
    )  # fmt: skip
    n_experts: int = declared(Count())
    n_experts_used: int = declared(Key(same_in_all, "expert_used_count", ("moe_topk", 1), condition=of_all))

    expected = Expected(
        gguf={"attention.causal": True, "expert_shared_count": 1},
        # transformers reads neither list: experts and the shared one have `intermediate_size`.
        hf={
            **{key: of for key, of in hunyuan_v1_dense.Config.expected.hf.items() if key != "num_experts"},
            "moe_intermediate_size": each("intermediate_size", 0), "num_shared_expert": each("n_shared", 1),
            "norm_topk_prob": True, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "num_experts_per_tok": None,
        },
        harmless=(
            *hunyuan_v1_dense.Config.expected.harmless, "output_router_logits", "router_aux_loss_coef",
            "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor",
        ),
    )  # fmt: skip


TENSORS = {name: row for name, row in hunyuan_v1_dense.TENSORS.items() if "mlp" not in row.hf}
NAMES = Names(router="gate.wg", shared="shared_mlp")
Model = standard.Model


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint."""
    made = decoder_plan(checkpoint, Config, TENSORS)
    made = with_experts(made, checkpoint, NAMES, made.config.intermediate_size)
    return with_shared_expert(made, NAMES, made.config.intermediate_size, has_weight=False)
