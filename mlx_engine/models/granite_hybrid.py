"""Granite 4: attention in some layers and a Mamba2 mixer in the others, with or without experts.

Reference: Hugging Face transformers, models/granitemoehybrid. Differences from Granite 3: Mamba2 mixers; in models with
Mamba2 mixers, attention usually has no rotary embedding. Published folders have the dense FFN in `shared_mlp`, with
gate and up as one matrix; in models with experts, `shared_mlp` is the shared expert. If a model has no experts, and
all its layers have attention with rotary embedding, its GGUF files have Granite 3's architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from mlx_engine.backends.parameters import Rope, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, Naming, Setting, constant, declared, each_layer, stated, whole
from mlx_engine.config.layer_kinds import OfSomeLayers
from mlx_engine.config.settings import Settings
from mlx_engine.models import granite, llama, mamba2
from mlx_engine.models.layer import Branch, LayerTensors
from mlx_engine.models.mamba2 import MAMBA
from mlx_engine.weights.experts import Count, Routed, of_all, with_experts
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, Table, decoder_plan

ARCHITECTURES = ("granitemoehybrid", "granitehybrid")
GGUF_ARCHITECTURE = "granitehybrid"

ATTENTION = "full_attention"
# Maps each name of a layer kind in config.json to the kind that `Kinds` returns. Published files have "attention" and
# "mamba"; transformers 5 writes "full_attention" and "linear_attention".
KINDS = {"attention": ATTENTION, "full_attention": ATTENTION, "mamba": MAMBA, "linear_attention": MAMBA}


class Kinds(Setting):
    """The setting of each layer's kind. In GGUF files, the layers without KV heads have a Mamba2 mixer."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[str, ...]:
        n = known.n_layers
        if naming == "gguf":
            found = s.counts("attention.head_count_kv", n) or [1] * n
            return tuple(ATTENTION if heads else MAMBA for heads in found)
        words = s.words("layer_types", n, *KINDS) or s.words("layers_block_type", n, *KINDS) or [MAMBA] * n
        kinds = tuple(KINDS[word] for word in words)
        if ATTENTION not in kinds:
            raise s.error("layer_types", "a layer with attention", words)
        return kinds

    def to_hf(self, value: tuple[str, ...], config: Any) -> Mapping[str, object]:
        return {"layer_types": ["attention" if kind == ATTENTION else kind for kind in value]}


class HeadDim(mamba2.HeadDim):
    """The setting of a mixer's head dim: for config.json, `mamba_expand * hidden_size / mamba_n_heads`."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "gguf":
            return super().read(s, naming, known)
        inner = s.whole("mamba_expand", 2) * known.hidden_size
        if inner % known.n_value_heads:
            raise s.error("mamba_n_heads", f"a divisor of {inner}", known.n_value_heads)
        s.expect(self.hf, inner // known.n_value_heads, "auto")
        return int(inner // known.n_value_heads)

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.hf: value, "mamba_expand": value * config.n_value_heads // config.hidden_size}


def is_rope(s: Settings, key: str, default: Any) -> bool:
    """Return whether attention has rotary embedding: a flag in GGUF files, "rope" or "nope" in config.json."""
    return s.flag(key, default) if key.startswith("rope") else s.choice(key, "nope", "rope") == "rope"


OF_ALL: dict[str, object] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "normalization_function": "rmsnorm",
    "init_method": "mup",
}  # fmt: skip
TRAINING = ("output_router_logits", "router_aux_loss_coef")


@dataclass(frozen=True)
class AttentionConfig(granite.Config):
    """The config of a dense model in which all layers have attention with rotary embedding."""

    intermediate_size: int = whole("feed_forward_length", ("shared_intermediate_size", 1024))
    gguf_architecture: ClassVar[str] = "granite"

    expected = Expected(
        hf={
            **OF_ALL, "position_embedding_type": stated("rope"), "num_local_experts": 0,
            "layer_types": each_layer("attention", "full_attention"),
            "layers_block_type": each_layer("attention", "full_attention"),
        },
        # Settings of Mamba2 mixers and of experts, which these models do not have.
        harmless=(
            "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
            "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok",
            "intermediate_size", *TRAINING,
        ),
    )  # fmt: skip

    def to_hf(self) -> dict[str, object]:
        return {**super().to_hf(), "position_embedding_type": "rope", "layer_types": ["attention"] * self.n_layers}


@dataclass(frozen=True)
class Config(mamba2.Sizes, granite.Config):
    intermediate_size: int = whole("feed_forward_length", ("shared_intermediate_size", 1024))
    n_kv_heads: int = declared(OfSomeLayers("attention.head_count_kv", "num_key_value_heads"))
    value_dim: int = declared(HeadDim("mamba_d_head"))
    kinds: tuple[str, ...] = declared(Kinds())
    is_rotated: bool = declared(Key(is_rope, ("rope.scaling.finetuned", True), "position_embedding_type"))
    attention_bias: bool = constant(False)
    mlp_bias: bool = constant(False)

    expected = Expected(
        gguf={"attention.causal": True, "expert_count": 0, "expert_used_count": 0},
        hf={
            **OF_ALL, "mamba_proj_bias": False, "time_step_limit": mamba2.unlimited, "num_local_experts": 0,
        },
        harmless=("mamba_chunk_size", "intermediate_size", "num_experts_per_tok", *TRAINING),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        heads = [self.n_kv_heads if kind == ATTENTION else 0 for kind in self.kinds]
        return {**super().to_gguf(), "attention.head_count_kv": heads}

    def to_hf(self) -> dict[str, object]:
        """Return this config as keys of config.json. Without `time_step_limit`, mlx-lm would clip time steps."""
        word = "rope" if self.is_rotated else "nope"
        return {**super().to_hf(), "position_embedding_type": word, "time_step_limit": [0.0, math.inf]}


@dataclass(frozen=True)
class SparseConfig(Routed, Config):
    """The settings of a model with experts; `intermediate_size` is the FFN size of one expert."""

    normalize: ClassVar[bool] = True
    intermediate_size: int = whole("feed_forward_length", "intermediate_size")
    shared_size: int = whole("expert_shared_feed_forward_length", ("shared_intermediate_size", 1024))
    n_experts: int = declared(Count("num_local_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={key: of for key, of in Config.expected.hf.items() if key != "num_local_experts"},
        harmless=("mamba_chunk_size", *TRAINING),
    )


LAYER = "model.layers.*."
GATE_UP, DOWN = (f"{LAYER}shared_mlp.{name}_linear.weight" for name in ("input", "output"))
# If this tensor is in a dense model's folder, mlx-lm has written the folder, and has split the matrix of gate and up.
GATE_OF_MLX = "model.layers.0.mlp.gate_proj.weight"


def _ffn(ending: str, size: str) -> dict[str, Row]:
    """Return the table rows of a dense FFN (`ending` is "", `size` "F") or of the shared expert ("_shexp", "S")."""
    return {
        f"blk.*.ffn_gate{ending}.weight": Row(GATE_UP, f"{size} D", after=(size,)),
        f"blk.*.ffn_up{ending}.weight": Row(GATE_UP, f"{size} D", before=(size,)),
        f"blk.*.ffn_down{ending}.weight": Row(DOWN, f"D {size}"),
    }


BASE = llama.TENSORS | llama.PERMUTED


def table(cfg: Config, checkpoint: Checkpoint) -> Table:
    """Return the tensor table of a `Config` or `SparseConfig`. `plan` makes the table of an `AttentionConfig`."""
    made = {name: row for name, row in BASE.items() if not name.endswith("bias")}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        made[f"blk.*.{part}.weight"] = replace(made[f"blk.*.{part}.weight"], kind=ATTENTION)
    made |= mamba2.rows(cfg, checkpoint, f"{LAYER}mamba.", MAMBA)
    if isinstance(cfg, SparseConfig):
        dense = [name for name, row in made.items() if row.shape in ("F D", "D F")]
        return {name: row for name, row in made.items() if name not in dense} | _ffn("_shexp", "S")
    return made if GATE_OF_MLX in checkpoint.shapes else made | _ffn("", "F")


class Model(granite.Model):
    def branch(self, config: Any, t: LayerTensors, rope: Rope | None, scores: Scores) -> Branch:
        if isinstance(config, Config) and config.kinds[t.i] == MAMBA:
            # granite.Model divides hidden states by the residual multiplier m, so `t.eps` is `norm_eps / m**2`. The
            # norm inside a mixer reads values that are not divided by m, so the epsilon of this norm is `norm_eps`.
            return Branch(mamba2.mixer(config, t._replace(eps=config.norm_eps)), t.linear("ssm_out"))
        is_rotated = not isinstance(config, Config) or config.is_rotated
        return super().branch(config, t, rope if is_rotated else None, scores)


def plan(checkpoint: Checkpoint) -> Plan:
    settings, is_hf = checkpoint.settings, checkpoint.naming == "hf"
    is_sparse = settings.get("num_local_experts" if is_hf else "expert_count", 0) not in (0, None)
    words = settings.get("layer_types", settings.get("layers_block_type")) if is_hf else None
    has_mixers = not isinstance(words, list) or not all(word in ("attention", ATTENTION) for word in words)
    if is_hf and not is_sparse and not has_mixers and settings.get("position_embedding_type") == "rope":
        dense = BASE if GATE_OF_MLX in checkpoint.shapes else BASE | _ffn("", "F")
        return decoder_plan(checkpoint, AttentionConfig, dense)
    config_type = SparseConfig if is_sparse else Config
    made = decoder_plan(checkpoint, config_type, partial(table, checkpoint=checkpoint))
    if not is_sparse:
        return made
    return with_experts(made, checkpoint, granite.NAMES, made.config.intermediate_size)
