"""LFM2, dense and with a mixture of experts: short convolutions in most layers, attention in the others.

Paper: "LFM2 Technical Report", arXiv 2511.23404. Reference: Hugging Face transformers, models/lfm2. A convolution
layer projects its input to two gates and a value, convolves the gated value over the last few tokens, and gates the
result. Attention layers are the same as in Qwen3.

Reference of the mixtures: models/lfm2_moe. The first `n_dense` layers have dense FFNs, the other layers have
mixtures of experts. The router chooses experts by `sigmoid(logits) + bias`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Scoring
from mlx_engine.backends.parameters import Convolution
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Naming,
    Setting,
    believable,
    convolves,
    declared,
    n_embeddings,
    number,
    partly_rotated_heads,
    whole,
    whole_or_zero,
)
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors, ShortConv
from mlx_engine.weights.experts import Count, Names, Routed, of_all
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table, head_of, tensors

ATTENTION, CONVOLUTION = "full_attention", "conv"


class KVHeads(Setting):
    """The setting of each layer's number of KV heads, 0 for convolution layers.

    config.json has one number, and either the kind of each layer (`layer_types`) or the indices of the layers with
    attention (`full_attn_idxs`).
    """

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[int, ...]:
        if naming == "gguf":
            found = s.counts("attention.head_count_kv", known.n_layers) or [known.n_heads] * known.n_layers
        else:
            n, kinds = s.whole("num_key_value_heads"), s.words("layer_types", known.n_layers, ATTENTION, CONVOLUTION)
            listed = s.indices("full_attn_idxs", known.n_layers)
            if kinds is None:
                kinds = [ATTENTION if i in listed else CONVOLUTION for i in range(known.n_layers)]
            found = [n if kind == ATTENTION else 0 for kind in kinds]
        different = {n for n in found if n}
        if len(different) != 1 or known.n_heads % max(different):
            expected = f"layers of attention with one number of KV heads, a divisor of {known.n_heads}"
            raise s.error("attention.head_count_kv" if naming == "gguf" else "layer_types", expected, found)
        return tuple(found)

    def to_gguf(self, value: tuple[int, ...]) -> Mapping[str, object]:
        return {"attention.head_count_kv": list(value)}

    def to_hf(self, value: tuple[int, ...], config: Any) -> Mapping[str, object]:
        return {"num_key_value_heads": max(value), "layer_types": [ATTENTION if n else CONVOLUTION for n in value]}


class FeedForward(Setting):
    """The setting of the FFN size.

    config.json has a size under `block_ff_dim` or `intermediate_size`. If `block_auto_adjust_ff_dim` is false, this
    size is the FFN size. If the flag is true (the default), the FFN size is computed as in the first Llama: 2/3 of this
    size, times `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
    """

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "gguf":
            return s.whole("feed_forward_length")
        size = s.whole("block_ff_dim", s.whole("intermediate_size", 12_288))
        factor, step = s.number("block_ffn_dim_multiplier", 1.0), s.whole("block_multiple_of", 256)
        if not s.flag("block_auto_adjust_ff_dim", True):
            return size
        return -(-int(factor * int(2 * size / 3)) // step) * step

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {"feed_forward_length": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        """Return the FFN size, and the keys of its adjustment, which is turned off. mlx-lm requires the latter keys."""
        rule = {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
        return {"intermediate_size": value, **rule}


@dataclass(frozen=True)
class Config(ConfigBase):
    n_layers: int = whole("block_count", "num_hidden_layers", condition=believable)
    hidden_size: int = whole("embedding_length", "hidden_size")
    intermediate_size: int = declared(FeedForward())
    n_heads: int = whole("attention.head_count", "num_attention_heads")
    kv_heads: tuple[int, ...] = declared(KVHeads())
    head_dim: int = partly_rotated_heads()
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    context_length: int = whole("context_length", ("max_position_embeddings", 128_000))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("norm_eps", 1e-5))
    conv_width: int = whole("shortconv.l_cache", ("conv_L_cache", 3), condition=convolves)
    rope: Rotation = rotation(theta=1e6)

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none"},
        hf={"conv_bias": False, "use_pos_enc": True, "block_use_swiglu": True, "rope_scaling": None},
        harmless=(
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",  # repeats norm_eps under its older name
            "block_out_init_scale",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",  # repeats num_attention_heads
            "theta",  # repeats rope_theta
        ),
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(ATTENTION if n else CONVOLUTION for n in self.kv_heads)

    @property
    def n_kv_heads(self) -> int:
        return max(self.kv_heads)

    @property
    def conv_channels(self) -> int:
        return self.hidden_size


# The parts of a convolution's projection, in the order of their rows.
GATES = ("in_gate", "out_gate", "value")
LAYER = "model.layers.*."
TENSORS = {
    "token_embd.weight": Row("model.embed_tokens.weight", "V D"),
    "output_norm.weight": Row("model.embedding_norm.weight", "D", gguf="token_embd_norm.weight"),
    "output.weight": Row("lm_head.weight", "V D"),
    "blk.*.attn_norm.weight": Row(f"{LAYER}operator_norm.weight", "D"),
    "blk.*.attn_q.weight": Row(f"{LAYER}self_attn.q_proj.weight", "HE D", kind=ATTENTION),
    "blk.*.attn_k.weight": Row(f"{LAYER}self_attn.k_proj.weight", "GE D", kind=ATTENTION),
    "blk.*.attn_v.weight": Row(f"{LAYER}self_attn.v_proj.weight", "GE D", kind=ATTENTION),
    "blk.*.attn_q_norm.weight": Row(f"{LAYER}self_attn.q_layernorm.weight", "E", kind=ATTENTION),
    "blk.*.attn_k_norm.weight": Row(f"{LAYER}self_attn.k_layernorm.weight", "E", kind=ATTENTION),
    "blk.*.attn_output.weight": Row(f"{LAYER}self_attn.out_proj.weight", "D HE", kind=ATTENTION),
    "blk.*.shortconv.out_proj.weight": Row(f"{LAYER}conv.out_proj.weight", "D C", kind=CONVOLUTION),
    "blk.*.shortconv.conv.weight": Row(f"{LAYER}conv.conv.weight", "C W", kind=CONVOLUTION),
    "blk.*.ffn_norm.weight": Row(f"{LAYER}ffn_norm.weight", "D"),
    "blk.*.ffn_gate.weight": Row(f"{LAYER}feed_forward.w1.weight", "F D"),
    "blk.*.ffn_up.weight": Row(f"{LAYER}feed_forward.w3.weight", "F D"),
    "blk.*.ffn_down.weight": Row(f"{LAYER}feed_forward.w2.weight", "D F"),
}


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        layers = [_layer(config, t) for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)]
        super().__init__(config, parameters, backend, layers=layers)


def _layer(cfg: Config, t: LayerTensors) -> Layer:
    if cfg.kinds[t.i] == ATTENTION:
        branch = Branch(Attention.read(t, cfg, cfg.rope.for_heads(cfg.head_dim)), t.linear("attn_output"))
        return Layer(norm=t.norm("attn_norm"), branches=(branch,), ffn=standard.feed_forward(t, cfg))
    gate, out_gate, value = (t.linear(f"shortconv.{part}") for part in GATES)
    name = f"blk.{t.i}.shortconv.conv"
    conv = Convolution(name, t.p.array(f"{name}.weight", transposed=True))
    mix = ShortConv((gate, out_gate, value), conv, ((cfg.conv_width - 1, cfg.conv_channels),))
    branch = Branch(mix, t.linear("shortconv.out_proj"))
    return Layer(norm=t.norm("attn_norm"), branches=(branch,), ffn=standard.feed_forward(t, cfg))


def plan(checkpoint: Checkpoint, config_type: type[Config] = Config, table: Table = TENSORS) -> Plan:
    s = Settings(checkpoint.settings, where=checkpoint.where)
    head = head_of(checkpoint, s, tied=checkpoint.naming == "gguf" or s.flag("tie_embedding", True))
    config = config_type.read(s, checkpoint.naming, checkpoint.n_embeddings)
    unused = ("lm_head.weight",) if head == "absent" else ()
    return Plan(config, tensors(config, _table(config, checkpoint, table), head), unused)


def _table(cfg: Config, checkpoint: Checkpoint, table: Table) -> Table:
    """Return `table` plus rows for the tensors of convolutions, whose stored form depends on the model's sizes."""
    D, W = cfg.hidden_size, cfg.conv_width
    projections = {
        f"blk.*.shortconv.{part}.weight": Row(
            f"{LAYER}conv.in_proj.weight", "C D", kind=CONVOLUTION, gguf="blk.*.shortconv.in_proj.weight",
            stored=TensorLayout("", rows=(i * D, 3 * D)),
        )
        for i, part in enumerate(GATES)
    }  # fmt: skip
    conv = "blk.*.shortconv.conv.weight"
    # transformers stores the weight of a depthwise Conv1d as (D, 1, W), mlx-lm as (D, W, 1).
    shapes = {shape for name, shape in checkpoint.shapes.items() if name.endswith("conv.conv.weight")}
    outer = (D, W, 1) if (D, W, 1) in shapes else (D, 1, W)
    return {**table, **projections, conv: replace(table[conv], in_hf=TensorLayout("", outer=outer))}


@dataclass(frozen=True)
class MoeConfig(Routed, Config):
    scoring: ClassVar[Scoring] = "sigmoid"
    sum_eps: ClassVar[float] = 1e-6
    normalize: ClassVar[bool] = True
    intermediate_size: int = whole("feed_forward_length", ("intermediate_size", 7168))
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 4), condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", ("moe_intermediate_size", 1792))
    n_dense: int = whole_or_zero(("leading_dense_block_count", 0), ("num_dense_layers", 2))

    expected = Expected(
        gguf={**Config.expected.gguf, "expert_gating_func": 2},
        hf={
            **Config.expected.hf, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        },
        harmless=(*Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )  # fmt: skip


MOE_TENSORS = llama.dense_first(TENSORS)
NAMES = Names("feed_forward", ("w1", "w3", "w2"), bias="expert_bias")


def moe_plan(checkpoint: Checkpoint) -> Plan:
    return standard.with_mixture(plan(checkpoint, MoeConfig, MOE_TENSORS), checkpoint, NAMES)


ARCHITECTURES = (
    Architecture(
        "LFM2, dense: short convolutions in most layers, grouped-query attention in the others",
        ("lfm2",), "lfm2", Config, Model, plan,
    ),
    Architecture(
        "LFM2 with a mixture of experts, such as LFM2-8B-A1B",
        ("lfm2_moe", "lfm2moe"), "lfm2moe", MoeConfig, Model, moe_plan,
    ),
)  # fmt: skip
