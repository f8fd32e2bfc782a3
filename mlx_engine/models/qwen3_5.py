"""The text model of Qwen3.5 and Qwen3.6, dense and with a mixture of experts.

Reference: Hugging Face transformers, models/qwen3_5. Three of four layers are gated delta networks ("Gated Delta
Networks", arXiv 2412.06464). They have a convolution over queries, keys and values. Their recurrent state is a matrix
per value head, and the last inputs of the convolution. The other layers have Qwen3's attention with two differences:
RoPE rotates only the first quarter of each head, and the output is multiplied by a sigmoid gate. Folders of
transformers store norm weights minus 1, except in delta networks.

Reference of the mixtures: models/qwen3_5_moe. Every FFN is a mixture of experts plus a shared expert with a sigmoid
gate, as in Qwen2-MoE. The weights of a token's experts add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import Convolution, DeltaNet, DeltaRule, Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Naming,
    Setting,
    convolves,
    declared,
    divides,
    halves,
    n_embeddings,
    n_layers,
    number,
    whole,
)
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.settings import HARMLESS, Settings
from mlx_engine.kernels.cached import cached_property
from mlx_engine.models import llama, mamba2, standard
from mlx_engine.models.decoder import Decoder, NextToken
from mlx_engine.models.layer import Attention, Branch, FeedForward, Gated, Layer, LayerTensors, Mixture
from mlx_engine.weights.experts import Count, Names, expert_tensors, experts, of_all, shared_tensors
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor, mtp_layers
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table, layer_tensors, stem_of, tensors

# The largest accepted number of rows of a matrix whose rows are reordered on load (`_check_rows`). Known models have
# fewer.
MOST_ROWS = 1 << 20
# The projections of a delta net, in the order of `DeltaNet.projections`.
PROJECTIONS = ("attn_qkv", "delta_gate", "ssm_beta", "ssm_alpha")
# Keys next to `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS,
    "image_token_id",
    "language_model_only",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
}


# ---- settings that are read from several keys ----

ATTENTION, DELTA = "full_attention", "linear_attention"
INTERVAL, INTERVAL_KEY = 4, "full_attention_interval"
# Settings of multimodal RoPE, which are ignored: they assign frequencies to three position ids (time, height, width),
# and for text the three ids are equal.
MROPE = ("mrope_section", "mrope_interleaved")
# The number of frequencies per position id. llama.cpp requires four numbers in GGUF files; the fourth id is unused.
SECTIONS = [11, 11, 10, 0]


class RotaryBase(Setting):
    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        if naming == "gguf":
            s.counts("rope.dimension_sections", len(SECTIONS))
            return s.number("rope.freq_base", 10_000.0)
        theta, nested = s.number("rope_theta", 10_000.0), s.mapping("rope_parameters") or s.mapping("rope_scaling")
        if nested is None:
            return theta
        nested.choice("rope_type", nested.choice("type", "default", "mrope"), "default", "mrope")
        found = nested.number("rope_theta", theta)
        nested.refuse_rest(("partial_rotary_factor", *MROPE))
        s.expect("rope_theta", found)
        return found

    def to_gguf(self, value: float) -> Mapping[str, object]:
        return {"rope.freq_base": value, "rope.dimension_sections": SECTIONS}

    def to_hf(self, value: float, config: Any) -> Mapping[str, object]:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


class RotaryDim(Setting):
    """The number of rotated elements in each head. config.json has the fraction of the head dim instead."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the number; raise an error unless it is even, at least 2, and at most the head dim."""
        key = "partial_rotary_factor"
        if naming == "gguf":
            key = "rope.dimension_count"
            found = s.whole(key, int(known.head_dim) // 4)
        else:
            nested = s.mapping("rope_parameters") or s.mapping("rope_scaling")
            share = s.number(key, 0.25)
            found = int(known.head_dim * (share if nested is None else nested.number(key, share)))
        if found < 2 or found % 2 or found > known.head_dim:
            raise s.error(key, f"an even number of at most {known.head_dim} elements", found)
        return int(found)

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {"rope.dimension_count": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {"rope_parameters": {"partial_rotary_factor": value / config.head_dim}}


# ---- tensors: their names, and the order of their rows in folders and in GGUF files ----
# Value heads of a delta network: in folders, the value heads that read the same key head are adjacent. In the model and
# in GGUF files, value head h reads key head h % G, with G key heads, so the value heads of folders are reordered on
# load. In Qwen3-Next (`are_neighbors`), the order is the same in the model, in GGUF files and in folders.
# Heads of attention: in both kinds of files, the rotated elements come first in a head. On load, the second half of the
# rotated elements is moved to the beginning of the second half of the head. Backends can then rotate whole heads with
# the pairs (j, j + E/2), where E is the head dim.

# Prefixes of the text model's tensors in three kinds of folders: without an image encoder, with one, written by mlx-lm.
STEMS = ("model.", "model.language_model.", "language_model.model.")
LAYER = "model.layers.*."
NET = f"{LAYER}linear_attn."
HEAD = "lm_head.weight"

# A function of (config, checkpoint, whether mlx-lm wrote the checkpoint) that returns a delta network's table rows.
DeltaRows: TypeAlias = Callable[[Any, Checkpoint, bool], dict[str, Row]]
# A function of (config, checkpoint, module of the FFN in a folder) that returns the expert tensors of the MTP layer
# (multi-token prediction).
ExtraExperts: TypeAlias = Callable[[Any, Checkpoint, str], list[Tensor]]

# The table rows of the embedding, the head, and the norms before mixers, FFNs and the head.
EVERYWHERE = {
    "token_embd.weight": Row("model.embed_tokens.weight", "V D"),
    "output_norm.weight": Row("model.norm.weight", "D", plus=1.0),
    "output.weight": Row(HEAD, "V D"),
    "blk.*.attn_norm.weight": Row(f"{LAYER}input_layernorm.weight", "D", plus=1.0),
    "blk.*.ffn_norm.weight": Row(
        f"{LAYER}post_attention_layernorm.weight", "D", plus=1.0, gguf="blk.*.post_attention_norm.weight"
    ),
}
DENSE = {name: row for name, row in llama.TENSORS.items() if row.shape in ("F D", "D F")}

# The MTP layer computes logits only for the first FIRST_TOKENS tokens of the vocabulary, which are the most frequent.
FIRST_TOKENS = 1 << 16
# The name of the MTP layer's projection in GGUF files (JOINED) and in folders (FC). NEXT_NORMS maps the names of the
# layer's norms in GGUF files to their names in folders.
JOINED, FC = "nextn.eh_proj", "mtp.fc.weight"
NEXT_NORMS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}


def value_head_order(n_key_heads: int, n_value_heads: int) -> tuple[int, ...]:
    """Return, for each value head of the model, its index in a folder."""
    return tuple(h % n_key_heads * (n_value_heads // n_key_heads) + h // n_key_heads for h in range(n_value_heads))


def rows_of(
    heads: tuple[int, ...] | range, apart: int, elements: tuple[int, ...] | range, first: int = 0
) -> tuple[int, ...]:
    """Return the rows of the given elements of the given heads; head h begins at row `first + h * apart`."""
    return tuple(first + head * apart + e for head in heads for e in elements)


def table(cfg: Any, checkpoint: Checkpoint, *, is_dense: bool, delta: DeltaRows) -> Table:
    """Return the tensor table of a checkpoint. If `is_dense`, the table also has the rows of the FFN."""
    conv = next((shape for name, shape in checkpoint.shapes.items() if name.endswith("conv1d.weight")), (0, 0, 0))
    # mlx-lm writes the weight of a convolution (C channels, W tokens) as (C, W, 1), not (C, 1, W), and adds 1 to norm
    # weights.
    is_mlx = checkpoint.naming == "hf" and conv[-1] == 1 and cfg.conv_width > 1
    found = {**EVERYWHERE, **(DENSE if is_dense else {}), **_attention(cfg), **delta(cfg, checkpoint, is_mlx)}
    if is_mlx:
        found = {name: replace(row, plus=0.0) for name, row in found.items()}
    stem = stem_of(checkpoint, STEMS)
    head = f"language_model.{HEAD}" if f"language_model.{HEAD}" in checkpoint.shapes else HEAD
    return {
        name: replace(row, hf=head if row.hf == HEAD else row.hf.replace(STEMS[0], stem, 1))
        for name, row in found.items()
    }


def extra_tensors(cfg: Any, checkpoint: Checkpoint, table: Table, experts: ExtraExperts | None) -> list[Tensor]:
    """Return the tensors of the MTP layer; `experts` is None for dense models.

    The list is empty unless the checkpoint has exactly one MTP layer, and all tensors of this layer. It is also empty
    if the MTP layer has an embedding table or a head. In folders, the MTP layer is the module `mtp`; in GGUF files, it
    is the layer with index `n_layers`.
    """
    i, prefix = cfg.n_layers, next((name[: -len(FC)] for name in checkpoint.shapes if name.endswith(FC)), "")
    plus = table["output_norm.weight"].plus
    rows = {
        name: replace(row, kind=None, hf=f"{prefix}mtp.layers.0.{row.hf.partition('layers.*.')[2]}")
        for name, row in table.items()
        if "*" in name and row.kind in (None, ATTENTION)
    }
    found = layer_tensors(cfg, rows, i)
    found += [] if experts is None else experts(cfg, checkpoint, f"{prefix}mtp.layers.0.mlp")
    found.append(Tensor(f"blk.{i}.{JOINED}.weight", f"{prefix}{FC}", (cfg.hidden_size, 2 * cfg.hidden_size)))
    for name, hf in NEXT_NORMS.items():
        stored = TensorLayout(f"{prefix}mtp.{hf}.weight", plus=plus)
        found.append(Tensor(f"blk.{i}.nextn.{name}.weight", stored, (cfg.hidden_size,)))
    names = [tensor.stored(checkpoint.naming).name for tensor in found]
    own = [f"blk.{i}.nextn.{part}.weight" for part in ("embed_tokens", "shared_head_head")]
    is_whole = mtp_layers(checkpoint) == 1 and all(name in checkpoint.shapes for name in names)
    has_own = any(name in checkpoint.shapes for name in (*own, f"{prefix}mtp.embed_tokens.weight"))
    return found if is_whole and not has_own else []


def _attention(cfg: Any) -> dict[str, Row]:
    """Return the table rows of attention.

    Files store queries and gates in one matrix: for each head the rows of the query, then the rows of the gate.
    """
    E, H, kind = cfg.head_dim, cfg.n_heads, ATTENTION
    both = (0, 2 * H * E)
    queries = TensorLayout("", rows=both, order=rows_of(range(H), 2 * E, range(E)))
    gates = TensorLayout("", rows=both, order=rows_of(range(H), 2 * E, range(E), first=E))
    name = f"{LAYER}self_attn."
    return {
        "blk.*.attn_q.weight": Row(f"{name}q_proj.weight", "HE D", kind=kind, rotated="H", stored=queries),
        "blk.*.attn_gate.weight": Row(
            f"{name}q_proj.weight", "HE D", kind=kind, gguf="blk.*.attn_q.weight", stored=gates
        ),
        "blk.*.attn_k.weight": Row(f"{name}k_proj.weight", "GE D", kind=kind, rotated="G"),
        "blk.*.attn_v.weight": Row(f"{name}v_proj.weight", "GE D", kind=kind),
        "blk.*.attn_q_norm.weight": Row(f"{name}q_norm.weight", "E", kind=kind, plus=1.0, rotated="1"),
        "blk.*.attn_k_norm.weight": Row(f"{name}k_norm.weight", "E", kind=kind, plus=1.0, rotated="1"),
        "blk.*.attn_output.weight": Row(f"{name}o_proj.weight", "D HE", kind=kind),
    }


def delta_rows(cfg: Any, checkpoint: Checkpoint, is_mlx: bool) -> dict[str, Row]:
    P, C, W, kind = cfg.value_dim, cfg.conv_channels, cfg.conv_width, DELTA
    order = value_head_order(1 if cfg.are_neighbors else cfg.n_key_heads, cfg.n_value_heads)
    keys = 2 * cfg.n_key_heads * cfg.key_dim
    is_same = order == tuple(range(len(order)))
    heads = TensorLayout("", order=None if is_same else order)
    values = replace(heads, order=None if is_same else rows_of(order, P, range(P)))
    channels = replace(heads, order=None if is_same else (*range(keys), *rows_of(order, P, range(P), first=keys)))
    out = TensorLayout("", columns=None if is_same else (order, P))
    return {
        "blk.*.attn_qkv.weight": Row(f"{NET}in_proj_qkv.weight", "C D", kind=kind, in_hf=channels),
        "blk.*.delta_gate.weight": Row(
            f"{NET}in_proj_z.weight", "UP D", kind=kind, in_hf=values, gguf="blk.*.attn_gate.weight"
        ),
        "blk.*.ssm_beta.weight": Row(f"{NET}in_proj_b.weight", "U D", kind=kind, in_hf=heads),
        "blk.*.ssm_alpha.weight": Row(f"{NET}in_proj_a.weight", "U D", kind=kind, in_hf=heads),
        "blk.*.ssm_conv1d.weight": Row(
            f"{NET}conv1d.weight", "C W", kind=kind,
            in_hf=replace(channels, outer=(C, W, 1) if is_mlx else (C, 1, W)),
        ),
        "blk.*.ssm_dt.bias": Row(f"{NET}dt_bias", "U", kind=kind, in_hf=heads),
        "blk.*.ssm_a": Row(f"{NET}A_log", "U", kind=kind, in_hf=replace(heads, is_log=True)),
        "blk.*.ssm_norm.weight": Row(f"{NET}norm.weight", "P", kind=kind),
        "blk.*.ssm_out.weight": Row(f"{NET}out_proj.weight", "D UP", kind=kind, in_hf=out),
    }  # fmt: skip


@dataclass(frozen=True)
class Config(ConfigBase):
    """The sizes of a Qwen3.5 model. The heads of delta networks differ in size from the heads of attention."""

    n_layers: int = n_layers()
    hidden_size: int = whole("embedding_length", "hidden_size")
    intermediate_size: int = whole("feed_forward_length", "intermediate_size")
    n_heads: int = whole("attention.head_count", "num_attention_heads")
    n_kv_heads: int = whole("attention.head_count_kv", "num_key_value_heads", condition=divides("n_heads"))
    head_dim: int = whole(
        ("attention.key_length", 256), ("head_dim", 256), repeated=("attention.value_length",), condition=halves
    )
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    context_length: int = whole("context_length", ("max_position_embeddings", 32_768))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))
    is_delta: tuple[bool, ...] = layer_kinds(
        INTERVAL, (DELTA, ATTENTION), interval={"gguf": INTERVAL_KEY, "hf": INTERVAL_KEY}, writes_usual=True
    )
    rope_theta: float = declared(RotaryBase())
    rotary_dim: int = declared(RotaryDim())
    conv_width: int = whole("ssm.conv_kernel", ("linear_conv_kernel_dim", 4), condition=convolves)
    key_dim: int = whole("ssm.state_size", ("linear_key_head_dim", 128))
    n_value_heads: int = whole("ssm.time_step_rank", ("linear_num_value_heads", 32))
    n_key_heads: int = whole("ssm.group_count", ("linear_num_key_heads", 16), condition=divides("n_value_heads"))
    value_dim: int = declared(mamba2.HeadDim("linear_value_head_dim", usual=128))

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none"},
        hf={
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "mlp_only_layers": [],
        },
        harmless=("mamba_ssm_dtype",),  # states are float32 here
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(DELTA if is_delta else ATTENTION for is_delta in self.is_delta)

    # Whether the value heads that read the same key head are adjacent in the model and in GGUF files, as in folders.
    are_neighbors: ClassVar[bool] = False

    @property
    def conv_channels(self) -> int:
        """The number of channels of a convolution: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @cached_property
    def rope(self) -> Rope:
        """The rotary embedding of a whole head. Pairs (j, j + E/2) that are not rotated have frequency 0."""
        rotated = Rope.plain(self.rotary_dim, self.rope_theta).frequencies
        return Rope(rotated + (0.0,) * (self.head_dim // 2 - len(rotated)))

    def to_gguf(self) -> dict[str, object]:
        return {**super().to_gguf(), "ssm.inner_size": self.n_value_heads * self.value_dim}


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        tensors = LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        layers = [
            Layer(
                norm=t.norm("attn_norm"),
                branches=(
                    Branch(_delta_net(config, t), t.linear("ssm_out"))
                    if kind == DELTA
                    else Branch(Attention.read(t, config, config.rope), t.linear("attn_output")),
                ),
                ffn=self.ffn(config, t),
            )
            for t, kind in zip(tensors, config.kinds, strict=True)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers)
        if f"blk.{config.n_layers}.{JOINED}.weight" in parameters:
            self.extra = self._extra(config, LayerTensors(parameters, config.n_layers, config.norm_eps))

    def _extra(self, config: Config, t: LayerTensors) -> NextToken:
        branch = Branch(Attention.read(t, config, config.rope), t.linear("attn_output"))
        layer = Layer(norm=t.norm("attn_norm"), branches=(branch,), ffn=self.ffn(config, t))
        norms = t.norm("nextn.enorm"), t.norm("nextn.hnorm"), t.norm("nextn.shared_head_norm")
        n = min(FIRST_TOKENS, config.vocab_size)
        head = t.p.first_rows(self.output.name, n) if n < config.vocab_size else self.output
        return NextToken(self, layer, t.linear(JOINED), norms, head, n)

    @staticmethod
    def ffn(config: Any, t: LayerTensors) -> FeedForward:
        return Gated.read(t)


def _delta_net(cfg: Config, t: LayerTensors) -> DeltaNet:
    qkv, gate, beta, step = (t.linear(part) for part in PROJECTIONS)
    p, name = t.p, f"blk.{t.i}"
    conv = Convolution(f"{name}.ssm_conv1d", p.array(f"{name}.ssm_conv1d.weight", transposed=True))
    rule = DeltaRule(
        f"{name}.ssm", p.array(f"{name}.ssm_a"), p.array(f"{name}.ssm_dt.bias"), cfg.n_key_heads, cfg.key_dim,
        cfg.n_value_heads, cfg.value_dim, cfg.are_neighbors,
    )  # fmt: skip
    state = ((cfg.conv_width - 1, cfg.conv_channels), (cfg.n_value_heads, cfg.key_dim, cfg.value_dim))
    return DeltaNet((qkv, gate, beta, step), conv, rule, t.rms_norm("ssm_norm"), state)


def _check_rows(s: Settings, cfg: Config) -> None:
    """Raise UnsupportedConfigError if a matrix has so many rows that a list of their order would exhaust memory."""
    attention, delta = 2 * cfg.n_heads * cfg.head_dim, cfg.conv_channels
    if max(attention, delta) > MOST_ROWS:
        raise s.error("heads and their widths", f"at most {MOST_ROWS:,} rows per matrix", max(attention, delta))


def plan(
    checkpoint: Checkpoint,
    config_type: type[Config] = Config,
    *,
    experts: ExtraExperts | None = None,
    delta: DeltaRows = delta_rows,
) -> Plan:
    """Return the config and the expected tensors of a checkpoint, without the experts of decoder layers.

    `experts` is a function that returns the expert tensors of the MTP layer, or None for dense models. `delta` returns
    the table rows of delta networks.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    s = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        config = config_type.read(s, "gguf", checkpoint.n_embeddings)
        _check_rows(s, config)
        rows = table(config, checkpoint, is_dense=experts is None, delta=delta)
        extra = extra_tensors(config, checkpoint, rows, experts)
        return Plan(config, tensors(config, rows, "optional"), extra=extra)
    text = s.mapping("text_config") or s
    tied = text.flag("tie_word_embeddings", False)
    if text is not s:
        tied = s.flag("tie_word_embeddings", tied)
        s.refuse_rest(AROUND_TEXT)
    config = config_type.read(text, "hf")
    _check_rows(text, config)
    unused = [name for name in checkpoint.shapes if name.startswith(("model.visual.", "vision_tower."))]
    heads = [f"{stem.removesuffix('model.')}lm_head.weight" for stem in STEMS] if tied else []
    rows = table(config, checkpoint, is_dense=experts is None, delta=delta)
    extra = extra_tensors(config, checkpoint, rows, experts)
    return Plan(config, tensors(config, rows, "absent" if tied else "required"), (*unused, *heads), extra=extra)


def _of_dense_layers(s: Settings, key: str, config: object) -> None:
    """Accept any FFN size of dense layers, because no layer is dense."""
    s.whole_or_zero(key)


@dataclass(frozen=True)
class MoeConfig(Config):
    """The sizes of a Qwen3.5 model with experts; `intermediate_size` is the FFN size of one expert."""

    intermediate_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    n_experts: int = declared(Count())
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    shared_size: int = whole("expert_shared_feed_forward_length", "shared_expert_intermediate_size")

    expected = Expected(
        gguf={**Config.expected.gguf, "feed_forward_length": _of_dense_layers},
        hf={
            **Config.expected.hf,
            "decoder_sparse_step": 1,
            "intermediate_size": _of_dense_layers,
            "norm_topk_prob": True,
        },
        harmless=(*Config.expected.harmless, "output_router_logits", "router_aux_loss_coef"),
    )


class MoeModel(Model):
    @staticmethod
    def ffn(config: MoeConfig, t: LayerTensors) -> Mixture:
        routing = Routing(config.n_experts_used, normalize=True)
        return Mixture(t.norm("ffn_norm"), experts(t.p, t.i, config.n_experts, routing))


NAMES = Names(is_fused=True)


def of_extra(cfg: MoeConfig, checkpoint: Checkpoint, block: str) -> list[Tensor]:
    """Return the expert tensors of the MTP layer; `block` is the module of the layer's FFN in a folder."""
    i = cfg.n_layers
    made = expert_tensors(cfg, checkpoint, NAMES, cfg.intermediate_size, i, [block])
    return [*made, *shared_tensors(cfg.hidden_size, cfg.shared_size, i, f"{block}.{NAMES.shared}")]


def moe_plan(checkpoint: Checkpoint) -> Plan:
    names = replace(NAMES, stem=stem_of(checkpoint, STEMS))
    return standard.with_mixture(plan(checkpoint, MoeConfig, experts=of_extra), checkpoint, names)


ARCHITECTURES = (
    Architecture(
        "Qwen3.5 and Qwen3.6, dense, the text model",
        ("qwen35", "qwen3_5", "qwen3_5_text"), "qwen35", Config, Model, plan,
    ),
    Architecture(
        "Qwen3.5 and Qwen3.6 with a mixture of experts, such as Qwen3.6-35B-A3B, the text model",
        ("qwen35moe", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen35moe", MoeConfig, MoeModel, moe_plan,
    ),
)  # fmt: skip
