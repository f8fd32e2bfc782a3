"""The `Model` of most architectures: layers of attention and an FFN, built from the config and the tensors alone.

The module of such an architecture needs only settings and a tensor table:

    Model = standard.Model
    plan = standard.plan(Config, TENSORS)

The config derives from `ConfigBase`, or from `Routed` (`weights/experts.py`) if the model has experts. Its optional
fields are `window`, the attention window in tokens; `is_local`: for each layer, whether it has the window (by default,
all layers have it); `has_rope`: for each layer, whether it has rotary embedding; `local_rope`, the rotary embedding of
layers with a window; `activation`; `logit_scale`; `logit_softcap`; and `rope_dim`, the size of the part of a head to
which `rope` is applied (by default `head_dim`). `with_mixture` lists further fields for experts.

A layer has the norms and biases whose tensors are in the file. Its FFN is a mixture of experts if there is a router
tensor, else gated if there is a gate tensor, else plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import SETTING, ConfigBase
from mlx_engine.errors import ModelError
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, FeedForward, Gated, Layer, LayerTensors, Mixture, Plain
from mlx_engine.weights.experts import Names, experts, with_experts, with_shared_expert
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.rope_divisors import FREQUENCIES, with_divisors
from mlx_engine.weights.table import Table, decoder_plan


class Model(Decoder):
    def __init__(self, config: Any, parameters: Parameters, backend: Backend) -> None:
        rope = rope_of(parameters, config)
        local = config.local_rope.for_heads(config.head_dim) if hasattr(config, "local_rope") else rope
        of_layers = zip(
            LayerTensors.of(parameters, config.n_layers, config.norm_eps, layer_norms=config.layer_norms),
            has_rope(config), config.windows, strict=True,
        )  # fmt: skip
        layers = [
            Layer(
                norm=t.norm_or_none("attn_norm"),
                branches=(
                    Branch(
                        self.mixer(config, t, of_layer if is_rotated else None, window),
                        t.linear("attn_output"), t.norm_or_none("post_attention_norm"),
                    ),
                ),
                ffn=feed_forward(t, config), is_parallel=config.is_parallel,
            )
            for t, is_rotated, window in of_layers
            for of_layer in (rope if window is None else local,)
        ]  # fmt: skip
        output_norm = parameters.norm(
            "output_norm", config.norm_eps, getattr(config, "logit_scale", 1.0), is_layer_norm=config.layer_norms
        )
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm,
            logit_softcap=getattr(config, "logit_softcap", None),
        )  # fmt: skip

    def mixer(self, config: Any, t: LayerTensors, rope: Rope | None, window: int | None) -> Attention:
        """Return the attention of a layer."""
        return Attention.read(t, config, rope, window=window)


def has_rope(config: Any) -> tuple[bool, ...]:
    """Return, for each layer, whether it has rotary embedding."""
    if config.only_local_rope and any(config.windows):
        return tuple(window is not None for window in config.windows)
    return tuple(getattr(config, "has_rope", (True,) * config.n_layers))


def feed_forward(t: LayerTensors, config: Any) -> FeedForward:
    """Return the FFN of a layer. If the FFN is parallel to attention and has no `ffn_norm`, its norm is `attn_norm`."""
    activation: Any = getattr(config, "activation", "silu")
    name = "attn_norm" if config.is_parallel and not t.has("ffn_norm") else "ffn_norm"
    if t.has("ffn_gate_inp"):
        chosen = experts(t.p, t.i, config.n_experts, config.routing(t.p, t.i), activation)
        post = t.rms_norm("post_ffw_norm") if t.has("post_ffw_norm") else None
        return Mixture(t.norm(name), replace(chosen, post_norm=post))
    norm = t.norm_or_none(name)
    if t.has("ffn_gate"):
        return replace(Gated.read(t, activation), norm=norm)
    return Plain(norm, t.linear("ffn_up"), t.linear("ffn_down"), activation)


def rope_of(p: Parameters, cfg: Any) -> Rope:
    """Return the rotary embedding. GGUF files of Llama 3 have the divisors of the frequencies as a tensor."""
    rope: Rope = cfg.rope.for_heads(getattr(cfg, "rope_dim", cfg.head_dim))
    if f"{FREQUENCIES}.weight" not in p:
        return rope
    factors = p.values(FREQUENCIES).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError("rope_freqs.weight has values that are not finite and positive; download the file again")
    return replace(rope, frequencies=tuple(f / factor for f, factor in zip(rope.frequencies, factors, strict=True)))


def plan(
    config_type: type[ConfigBase], table: Table | Callable[[Any], Table], *, tied: bool = False,
    experts_of: Names | None = None, aliases: Mapping[str, str] | None = None,
) -> Callable[[Checkpoint], Plan]:  # fmt: skip
    """Return the function `plan` of an architecture.

    Args:
        config_type: the class of the config.
        table: the tensor table, or a function that returns the table for a config.
        tied: the default of `tie_word_embeddings` in config.json.
        experts_of: the names of router and experts in Hugging Face folders, for models with experts.
        aliases: maps alternative keys of config.json to the keys that the config declares.
    """

    def planned(checkpoint: Checkpoint) -> Plan:
        if aliases is not None:
            settings = {aliases.get(key, key): value for key, value in checkpoint.settings.items()}
            checkpoint = replace(checkpoint, settings=settings)
        is_fused = checkpoint.naming == "gguf" and "blk.0.attn_qkv.weight" in checkpoint.shapes
        of_file = with_fused_qkv(table) if is_fused and not callable(table) else table
        made = with_rotation(checkpoint, decoder_plan(checkpoint, config_type, of_file, tied=tied))
        return made if experts_of is None else with_mixture(made, checkpoint, experts_of)

    return planned


def with_mixture(made: Plan, checkpoint: Checkpoint, names: Names) -> Plan:
    """Add to the plan `made` the tensors of router and experts, and of shared experts if the config has any.

    `expert_size` is the FFN size of one expert, by default `intermediate_size`. If the config has `n_shared`, the
    number of shared experts, these are stored as one expert of `n_shared` times this size, without a gate. If the
    config has `shared_size`, there is one shared expert of this FFN size, with a gate.
    """
    cfg: Any = made.config
    size, n_shared = getattr(cfg, "expert_size", cfg.intermediate_size), getattr(cfg, "n_shared", 0)
    made = with_experts(made, checkpoint, names, size)
    if hasattr(cfg, "shared_size"):
        return with_shared_expert(made, names, cfg.shared_size)
    return with_shared_expert(made, names, n_shared * size, has_weight=False) if n_shared else made


def with_fused_qkv(table: Table) -> Table:
    """Return a table for GGUF files that store queries, keys and values as one tensor."""
    sizes, made = ("HE", "GE", "GE"), dict(table)
    for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
        for kind in ("weight", "bias"):
            row = table.get(f"blk.*.{name}.{kind}")
            if row is not None:
                gguf, before, after = f"blk.*.attn_qkv.{kind}", sizes[:i], sizes[i + 1 :]
                made[f"blk.*.{name}.{kind}"] = replace(row, gguf=gguf, before=before, after=after)
    return made


def with_rotation(checkpoint: Checkpoint, made: Plan) -> Plan:
    """Add to a plan the divisors of rotary frequencies, which GGUF files have as tensors (Llama 3, LongRoPE)."""
    rules = next(f.metadata[SETTING].rules for f in fields(made.config) if f.name == "rope")
    made = with_divisors(checkpoint, made) if "longrope" in rules else made
    if "llama3" not in rules:
        return made
    config: Any = made.config
    if checkpoint.naming == "gguf":
        factors = Tensor(f"{FREQUENCIES}.weight", "", (config.head_dim // 2,), required=False)
        return replace(made, tensors=[*made.tensors, factors])
    if config.rope.rule != "llama3":
        return made
    divisors = {f"{FREQUENCIES}.weight": config.rope.divisors(config.head_dim)}
    return replace(made, in_tensors=(*made.in_tensors, "rope"), gguf_only=divisors)
