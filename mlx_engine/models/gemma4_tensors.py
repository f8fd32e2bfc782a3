"""The tensors of Gemma 4: their names, and which of them a layer has.

Norm weights are stored as they are, unlike Gemma 3's. In a mixture of experts the router's norm has a weight of its
own, and each expert a factor, which files store beside the matrices (`experts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_engine.models import gemma3
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.table import Row, Table, layer_tensors, tensors

if TYPE_CHECKING:
    from mlx_engine.models.gemma4 import Config

LAYER = "model.layers.*."
TENSORS = {
    **{name: replace(row, plus=0.0) for name, row in gemma3.TENSORS.items()},
    "blk.*.layer_output_scale.weight": Row(f"{LAYER}layer_scalar", "1"),
}
PER_LAYER_TENSORS = {
    "per_layer_token_embd.weight": Row("model.embed_tokens_per_layer.weight", "V LI"),
    "per_layer_model_proj.weight": Row("model.per_layer_model_projection.weight", "LI D"),
    "per_layer_proj_norm.weight": Row("model.per_layer_projection_norm.weight", "I"),
    "blk.*.inp_gate.weight": Row(f"{LAYER}per_layer_input_gate.weight", "I D"),
    "blk.*.proj.weight": Row(f"{LAYER}per_layer_projection.weight", "D I"),
    "blk.*.post_norm.weight": Row(f"{LAYER}post_per_layer_input_norm.weight", "D"),
}
EXPERT_TENSORS = {
    "blk.*.pre_ffw_norm_2.weight": Row(f"{LAYER}pre_feedforward_layernorm_2.weight", "D"),
    "blk.*.post_ffw_norm_1.weight": Row(f"{LAYER}post_feedforward_layernorm_1.weight", "D"),
    "blk.*.post_ffw_norm_2.weight": Row(f"{LAYER}post_feedforward_layernorm_2.weight", "D"),
    "blk.*.ffn_gate_inp_norm.weight": Row(f"{LAYER}router.scale", "D", gguf="blk.*.ffn_gate_inp.scale"),
    "blk.*.ffn_down_exps_scale.weight": Row(f"{LAYER}router.per_expert_scale", "X", gguf="blk.*.ffn_down_exps.scale"),
}
KEYS, VALUES = ("blk.*.attn_k.weight", "blk.*.attn_k_norm.weight"), "blk.*.attn_v.weight"


def table(config: Config, stem: str = gemma3.STEMS[0]) -> dict[str, Row]:
    """Return the tensor table of a model, with the names of a folder's tensors after this prefix."""
    found = {**TENSORS, **(PER_LAYER_TENSORS if config.per_layer_size else {})}
    found |= EXPERT_TENSORS if config.n_experts else {}
    return {name: replace(row, hf=row.hf.replace(gemma3.STEMS[0], stem)) for name, row in found.items()}


def planned(config: Config, table: Table, unused: Sequence[str], *more: Tensor) -> Plan:
    """Return the plan of a table's tensors. Layers do not read the projections that they share, if a file has them."""
    is_gguf = bool(more)
    outside = {name: row for name, row in table.items() if "*" not in name}
    made = [*tensors(config, outside, "optional" if is_gguf else "absent"), *more]
    unread = list(unused)
    for i in range(config.n_layers):
        absent = _absent(config, i)
        made += layer_tensors(config.of_layer(i), {name: row for name, row in table.items() if name not in absent}, i)
        unread += [(name if is_gguf else table[name].hf).replace("*", str(i)) for name in absent]
    return Plan(config, made, tuple(unread))


def _absent(config: Config, i: int) -> tuple[str, ...]:
    """Return the tensors that layer i does not have, by their names in the table."""
    if config.shares(i) is not None:
        return (*KEYS, VALUES)
    return (VALUES,) if config.k_is_v and not config.is_local[i] else ()
