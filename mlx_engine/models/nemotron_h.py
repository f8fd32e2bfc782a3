"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba2 mixer, or attention, or an FFN.

Paper: "Nemotron-H", arXiv 2504.03624. Reference: Hugging Face transformers, models/nemotron_h. Attention has no rotary
embedding. FFNs and experts have no gate; their activation is the square of ReLU. In Nemotron 3, each FFN is a mixture
of experts plus a shared expert; the router chooses experts by `sigmoid(logits) + bias`. transformers 5 clamps Mamba2's
time steps to at least `time_step_min`; this engine, NVIDIA's published code, llama.cpp and mlx-lm do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Scoring
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    Expected,
    Key,
    Naming,
    Setting,
    believable,
    convolves,
    declared,
    divides,
    flag,
    n_embeddings,
    number,
    said,
    same_as,
    whole,
)
from mlx_engine.config.layer_kinds import OfSomeLayers
from mlx_engine.config.settings import Settings
from mlx_engine.models import mamba2
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors, Mixture, Plain
from mlx_engine.models.mamba2 import MAMBA
from mlx_engine.weights.experts import (
    Count,
    Names,
    Routed,
    experts,
    of_all,
    of_groups,
    with_experts,
    with_shared_expert,
)
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, Table, decoder_plan

ARCHITECTURES = ("nemotron_h", "nemotron_h_moe")
GGUF_ARCHITECTURE = "nemotron_h"

ATTENTION, MLP, MOE = "full_attention", "mlp", "moe"
# WORDS maps each word in config.json's list `layers_block_type` to the kind of a layer. LETTERS does so for each letter
# in config.json's string `hybrid_override_pattern`.
WORDS = {
    "mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION, "mlp": MLP,
    "moe": MOE,
}  # fmt: skip
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
PATTERN, LIST = "hybrid_override_pattern", "layers_block_type"


def kinds_of(s: Settings) -> tuple[str, ...]:
    """Return the kind of each layer from config.json's pattern of letters or its list of words."""
    pattern, words = s.pattern(PATTERN, "".join(LETTERS)), s.some_words(LIST, *WORDS)
    of_words = tuple(WORDS[word] for word in words or ())
    of_pattern = tuple(LETTERS[letter] for letter in pattern or ())
    if of_words and of_pattern and of_words != of_pattern:
        raise s.error(PATTERN, f"the layers of {LIST}", pattern)
    if not of_words + of_pattern:
        raise s.error(PATTERN, "present", "nothing")
    return of_words or of_pattern


class Layers(Setting):
    """The setting of the number of layers. For config.json, `read` counts the layer kinds in its pattern or list."""

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        n = s.whole("block_count") if naming == "gguf" else len(kinds_of(s))
        expected = believable(n, known)
        if expected is not None:
            raise s.error("block_count" if naming == "gguf" else PATTERN, f"{expected} layers", n)
        return n

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {"block_count": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {"num_hidden_layers": value}


class Kinds(Setting):
    """The setting of each layer's kind.

    GGUF files have the number of KV heads and the FFN size of each layer. A layer with KV heads is attention, a layer
    with an FFN size is an FFN, and a layer with neither is a Mamba2 mixer.
    """

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[str, ...]:
        if naming == "hf":
            found = kinds_of(s)
            if {MLP, MOE} <= {*found}:
                raise s.error(PATTERN, "all FFNs with experts, or all without experts", "both")
            return found
        n = known.n_layers
        of_ffn = MOE if s.whole_or_zero("expert_count") else MLP
        heads, widths = (s.counts(key, n) or [0] * n for key in ("attention.head_count_kv", "feed_forward_length"))
        return tuple(ATTENTION if heads[i] else of_ffn if widths[i] else MAMBA for i in range(n))

    def to_hf(self, value: tuple[str, ...], config: Any) -> Mapping[str, object]:
        letters = {kind: letter for letter, kind in LETTERS.items()}
        return {PATTERN: "".join(letters[kind] for kind in value)}


def head_size(s: Settings, key: str, default: Any) -> int:
    """Return the head dim. In older folders its key is `attention_head_dim`."""
    return s.whole(key, s.whole("attention_head_dim", 128) if key == "head_dim" else default)


def unread(s: Settings, key: str, config: Any) -> None:
    """Accept any number >= 0 for a setting of rotary embedding, because attention has no rotary embedding."""
    s.number_or_zero(key)


def of_expert_groups(n_used: int, known: Any) -> str | None:
    """Check `n_groups_used` with `of_groups`.

    `of_groups` reads the number of expert groups from a field `n_groups`. In `SparseConfig`, `n_groups` is the number
    of Mamba2's groups. So `of_groups` gets an object whose `n_groups` is `n_expert_groups`.
    """
    sizes = {"n_experts": known.n_experts, "n_experts_used": known.n_experts_used, "n_groups": known.n_expert_groups}
    return of_groups(n_used, SimpleNamespace(**sizes))


OF_EXPERTS = (
    *("n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok"),
    *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
)
HARMLESS = (
    *("chunk_size", "expand", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min"),
    *("time_step_rank", "rms_norm_eps", "norm_eps", "rope_theta", "partial_rotary_factor", "rope_parameters"),
    # transformers does not read these two keys. Biases in a file would be refused as unknown tensors.
    *("attention_bias", "mamba_proj_bias"),
    *("moe_shared_expert_overlap", "output_router_logits", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)


@dataclass(frozen=True)
class Config(mamba2.Sizes):
    conv_width: int = whole("ssm.conv_kernel", ("conv_kernel", 4), condition=convolves)
    state_dim: int = whole("ssm.state_size", ("ssm_state_size", 128))
    n_value_heads: int = whole("ssm.time_step_rank", ("mamba_num_heads", 128))
    n_groups: int = whole(("ssm.group_count", 1), ("n_groups", 8), condition=divides("n_value_heads"))
    value_dim: int = declared(mamba2.HeadDim("mamba_head_dim"))
    conv_bias: bool = said(("use_conv_bias", True))
    n_layers: int = declared(Layers())
    kinds: tuple[str, ...] = declared(Kinds())
    hidden_size: int = whole("embedding_length", "hidden_size")
    intermediate_size: int = declared(OfSomeLayers("feed_forward_length", "intermediate_size"))
    n_heads: int = whole("attention.head_count", "num_attention_heads")
    n_kv_heads: int = declared(OfSomeLayers("attention.head_count_kv", "num_key_value_heads"))
    head_dim: int = declared(Key(head_size, "attention.key_length", ("head_dim", 0), ("attention.value_length",)))
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    context_length: int = whole("context_length", ("max_position_embeddings", 4096))
    # llama.cpp computes with `attention.layer_norm_rms_epsilon`, but also requires `attention.layer_norm_epsilon`.
    norm_eps: float = declared(
        Key(
            Settings.number, "attention.layer_norm_rms_epsilon", ("layer_norm_epsilon", 1e-5),
            ("attention.layer_norm_epsilon",),
        )
    )  # fmt: skip

    expected = Expected(
        gguf={
            "attention.causal": True, "rope.scaling.finetuned": False, "rope.dimension_count": unread,
            "rope.freq_base": unread, "expert_count": 0, "expert_used_count": 0,
        },
        hf={
            "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False, "use_bias": False,
            "time_step_limit": mamba2.unlimited, "moe_latent_size": None, "num_hidden_layers": same_as("n_layers"),
        },
        harmless=(*HARMLESS, *OF_EXPERTS),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        heads = [self.n_kv_heads if kind == ATTENTION else 0 for kind in self.kinds]
        widths = [self.intermediate_size if kind in (MLP, MOE) else 0 for kind in self.kinds]
        return {
            **super().to_gguf(), "attention.head_count_kv": heads, "feed_forward_length": widths,
            "rope.scaling.finetuned": False,
        }  # fmt: skip


@dataclass(frozen=True)
class SparseConfig(Routed, Config):
    """The settings of a model with experts; `intermediate_size` is the FFN size of one expert."""

    scoring: ClassVar[Scoring] = "sigmoid"
    gguf_architecture: ClassVar[str] = "nemotron_h_moe"
    intermediate_size: int = declared(OfSomeLayers("feed_forward_length", "moe_intermediate_size"))
    n_experts: int = declared(Count("n_routed_experts"))
    n_experts_used: int = whole("expert_used_count", ("num_experts_per_tok", 2), condition=of_all)
    shared_size: int = whole("expert_shared_feed_forward_length", ("moe_shared_expert_intermediate_size", 7688))
    routed_scale: float = number(("expert_weights_scale", 1.0), ("routed_scaling_factor", 1.0))
    normalize: bool = flag(("expert_weights_norm", True), ("norm_topk_prob", True))
    n_expert_groups: int = whole(("expert_group_count", 1), ("n_group", 1), condition=divides("n_experts"))
    n_groups_used: int = whole(("expert_group_used_count", 1), ("topk_group", 1), condition=of_expert_groups)

    expected = Expected(
        gguf={
            **{key: of for key, of in Config.expected.gguf.items() if not key.startswith("expert")},
            "expert_gating_func": 2, "expert_feed_forward_length": same_as("intermediate_size"),
            "expert_shared_count": 1, "moe_latent_size": 0,
        },
        hf=Config.expected.hf,
        harmless=(*HARMLESS, "intermediate_size", "n_shared_experts"),
    )  # fmt: skip

    @property
    def ffn_kinds(self) -> tuple[str, ...]:
        """The kind of each layer's FFN: "sparse" for a mixture of experts, "none" for no FFN."""
        return tuple("sparse" if kind == MOE else "none" for kind in self.kinds)

    @property
    def groups(self) -> tuple[int, int] | None:
        return None if self.n_expert_groups == 1 else (self.n_expert_groups, self.n_groups_used)

    def to_hf(self) -> dict[str, object]:
        """Return this config as keys of config.json. mlx-lm requires `intermediate_size`, but does not use it."""
        return {**super().to_hf(), "intermediate_size": self.intermediate_size}

    def to_gguf(self) -> dict[str, object]:
        more = {"expert_feed_forward_length": self.intermediate_size, "expert_shared_count": 1}
        return {**super().to_gguf(), **more}


LAYER = "backbone.layers.*."
TENSORS = {
    **mamba2.TENSORS,
    "blk.*.attn_q.weight": Row(f"{LAYER}mixer.q_proj.weight", "HE D", kind=ATTENTION),
    "blk.*.attn_k.weight": Row(f"{LAYER}mixer.k_proj.weight", "GE D", kind=ATTENTION),
    "blk.*.attn_v.weight": Row(f"{LAYER}mixer.v_proj.weight", "GE D", kind=ATTENTION),
    "blk.*.attn_output.weight": Row(f"{LAYER}mixer.o_proj.weight", "D HE", kind=ATTENTION),
    "blk.*.ffn_up.weight": Row(f"{LAYER}mixer.up_proj.weight", "F D", kind=MLP),
    "blk.*.ffn_down.weight": Row(f"{LAYER}mixer.down_proj.weight", "D F", kind=MLP),
}
NAMES = Names(
    "mixer", ("", "up_proj", "down_proj"), stem="backbone.", bias="gate.e_score_correction_bias",
    shared="shared_experts", stacked_parts=("", "fc1", "fc2"),
)  # fmt: skip


def table(cfg: Config, checkpoint: Checkpoint) -> Table:
    return {**TENSORS, **mamba2.rows(cfg, checkpoint, f"{LAYER}mixer.", MAMBA)}


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        layers = [_layer(config, t) for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)]
        super().__init__(config, parameters, backend, layers=layers)


def _layer(cfg: Any, t: LayerTensors) -> Layer:
    kind, norm = cfg.kinds[t.i], t.norm("attn_norm")
    if kind == MAMBA:
        return Layer(norm=norm, branches=(Branch(mamba2.mixer(cfg, t), t.linear("ssm_out")),))
    if kind == ATTENTION:
        return Layer(norm=norm, branches=(Branch(Attention.read(t, cfg, None), t.linear("attn_output")),))
    if kind == MLP:
        return Layer(ffn=Plain(norm, t.linear("ffn_up"), t.linear("ffn_down"), "relu2"))
    return Layer(ffn=Mixture(norm, experts(t.p, t.i, cfg.n_experts, cfg.routing(t.p, t.i), "relu2")))


def plan(checkpoint: Checkpoint) -> Plan:
    settings = checkpoint.settings
    if checkpoint.naming == "gguf":
        is_sparse = settings.get("expert_count", 0) != 0
    else:
        is_sparse = MOE in kinds_of(Settings(settings, where=checkpoint.where))
    made = decoder_plan(checkpoint, SparseConfig if is_sparse else Config, partial(table, checkpoint=checkpoint))
    if not is_sparse:
        return made
    made = with_experts(made, checkpoint, NAMES, made.config.intermediate_size)
    return with_shared_expert(made, NAMES, made.config.shared_size, has_weight=False)
