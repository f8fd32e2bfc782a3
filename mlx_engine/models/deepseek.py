"""DeepSeek-V2-Lite, DeepSeek-V3 and R1, Kimi K2, GLM-4.7-Flash, and Youtu-LLM.

Papers: "DeepSeek-V2", arXiv 2405.04434; "DeepSeek-V3", arXiv 2412.19437. Reference: Hugging Face transformers,
models/deepseek_v2, deepseek_v3, glm4_moe_lite and youtu. The models have multi-head latent attention
(`layer.LatentAttention`), a few dense first layers, then mixtures of experts; in Youtu-LLM, all layers are dense. The
router of V2 chooses the experts with the largest softmax scores. The other routers choose the experts with the largest
sigmoid(logit) + bias in the best groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Scoring
from mlx_engine.backends.parameters import Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Naming,
    Setting,
    believable,
    declared,
    divides,
    flag,
    halves,
    n_embeddings,
    n_layers,
    number,
    same_as,
    whole,
    whole_or_none,
)
from mlx_engine.config.rope import Rotation, RotationSetting, yarn_attention
from mlx_engine.config.settings import REQUIRED, Settings
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Branch, LatentAttention, Layer, LayerTensors
from mlx_engine.weights.experts import Count, InGroups, Names, Routed, of_all, of_groups
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu", "youtu_llm", "deepseek2")
GGUF_ARCHITECTURE = "deepseek2"
# The epsilon of the norms of latents; the other norms have the epsilon of the config.
LATENT_EPS = 1e-6


class Mscale(Setting):
    """YaRN's `mscale_all_dim`, which determines a factor of attention scores. GGUF files store a tenth of its value."""

    def read(self, s: Settings, naming: Naming, known: Any) -> float:
        if naming == "gguf":
            return round(10 * s.number_or_zero("rope.scaling.yarn_log_multiplier"), 6)
        scaling = s.mapping("rope_parameters") or s.mapping("rope_scaling")
        if scaling is None:
            return 0.0
        found = scaling.number_or_zero("mscale_all_dim")
        if found and scaling.number_or_zero("mscale") != found:
            raise s.error("mscale", f"{found:g}, as mscale_all_dim", scaling.number_or_zero("mscale"))
        return found

    def to_gguf(self, value: float) -> Mapping[str, object]:
        return {"rope.scaling.yarn_log_multiplier": value / 10} if value else {}

    def to_hf(self, value: float, config: Any) -> Mapping[str, object]:
        return {"rope_parameters": {"mscale": value, "mscale_all_dim": value}} if value else {}


class Rotary(RotationSetting):
    """The setting of the rotary embedding. If `Latent.mscale` is not 0, YaRN scales scores, not cosines and sines."""

    def read(self, s: Settings, naming: Naming, known: Any) -> Rotation:
        found = super().read(s, naming, known)
        return replace(found, attention_factor=1.0) if known.mscale and found.rule == "yarn" else found

    def to_gguf(self, value: Rotation) -> Mapping[str, object]:
        usual = yarn_attention(value.factor) if value.rule == "yarn" else value.attention_factor
        return super().to_gguf(replace(value, attention_factor=usual))

    def to_hf(self, value: Rotation, config: Any) -> Mapping[str, object]:
        usual = yarn_attention(value.factor) if config.mscale else value.attention_factor
        return super().to_hf(replace(value, attention_factor=usual), config)


ROTARY = Rotary(rules=("yarn",))


@dataclass(frozen=True)
class OfHead(Setting):
    """The setting of a size of each head: the elements of a key that are not rotated, or the elements of a value.

    In GGUF files, `attention.key_length_mla` counts all elements of a head's key, also the rotated ones, and
    `attention.value_length_mla` the elements of its value. `attention.key_length` and `attention.value_length` are the
    sizes of the cached key and value. In older files, which lack the keys with `_mla`, they are the sizes of a head.

    Attributes:
        part: "key" or "value".
        hf: the key in config.json.
        usual: the default, or a function that computes it from the fields read before; REQUIRED if there is no default.
    """

    part: str
    hf: str
    usual: Any = REQUIRED

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        default = self.usual(known) if callable(self.usual) else self.usual
        if naming == "hf":
            return s.whole_or_none(self.hf, default) or default
        key = f"attention.{self.part}_length"
        usual, rotated = s.whole(key, default), known.rope_dim if self.part == "key" else 0
        found = s.whole(f"{key}_mla", usual)
        if found <= rotated:
            raise s.error(f"{key}_mla", f"more than the {rotated} rotated elements", found)
        return found - rotated

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.hf: value}


@dataclass(frozen=True)
class DenseLayers(Setting):
    """The setting of the number of dense layers, which are the first layers.

    config.json has this number or a list of each layer's kind. `usual` is the number if config.json has neither.
    """

    usual: Any = REQUIRED

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "gguf":
            return s.whole_or_zero("leading_dense_block_count")
        kinds = s.words("mlp_layer_types", known.n_layers, "dense", "sparse")
        n = s.whole_or_zero("first_k_dense_replace", self.usual if kinds is None else kinds.count("dense"))
        if kinds is not None and kinds != ["dense"] * n + ["sparse"] * (known.n_layers - n):
            raise s.error("mlp_layer_types", f"{n} dense layers, then sparse ones", kinds)
        return n

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {"leading_dense_block_count": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {"first_k_dense_replace": value}


def one_or_all(s: Settings, key: str, config: Any) -> None:
    """Check that the number of KV heads equals that of query heads; in GGUF files, it may also be 1."""
    s.expect(key, 1 if key.startswith("attention.") else config.n_heads, config.n_heads)


@dataclass(frozen=True)
class Latent(ConfigBase):
    """The sizes of a model with latent attention.

    Attributes:
        is_interleaved: whether rotary pairs are the rows (2j, 2j + 1) in files.
        is_joined: whether all GGUF files of this architecture have one tensor for the projections of the latent to keys
            and to values. If False, the names of a file's tensors decide.
    """

    is_interleaved: ClassVar[bool] = True
    is_joined: ClassVar[bool] = False
    n_kv_arrays: ClassVar[int] = 1
    n_kv_heads: ClassVar[int] = 1
    n_layers: int = n_layers()
    hidden_size: int = whole("embedding_length", "hidden_size")
    intermediate_size: int = whole("feed_forward_length", "intermediate_size")
    n_heads: int = whole("attention.head_count", "num_attention_heads", condition=believable)
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    context_length: int = whole("context_length", ("max_position_embeddings", 2048))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    latent: int = whole("attention.kv_lora_rank", "kv_lora_rank")
    q_rank: int | None = whole_or_none(("attention.q_lora_rank", None), "q_lora_rank")
    rope_dim: int = whole("rope.dimension_count", "qk_rope_head_dim", condition=halves)
    nope_dim: int = declared(OfHead("key", "qk_nope_head_dim"))
    value_dim: int = declared(OfHead("value", "v_head_dim"))
    mscale: float = declared(Mscale())
    rope: Rotation = declared(ROTARY)  # noqa: RUF009 - `declared` returns a dataclass field

    @property
    def head_dim(self) -> int:
        """The number of cached elements per token and layer: those of the latent, and the rotated elements of keys."""
        return self.latent + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Equal to `head_dim`, so that only `latent_tensors` reorders rotary pairs, and the tensor table does not."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """The scale of attention scores, including YaRN's factor (`mscale`)."""
        grown = yarn_attention(self.rope.factor, self.mscale) if self.mscale and self.rope.rule == "yarn" else 1.0
        return float((self.nope_dim + self.rope_dim) ** -0.5 * grown * grown)

    def to_gguf(self) -> dict[str, object]:
        keys = {key: value for key, value in super().to_gguf().items() if value is not None}
        lengths = {"key_length": self.head_dim, "value_length": self.latent}
        lengths |= {"key_length_mla": self.nope_dim + self.rope_dim, "value_length_mla": self.value_dim}
        return {**keys, **{f"attention.{key}": value for key, value in {**lengths, "head_count_kv": 1}.items()}}


@dataclass(frozen=True)
class Config(Routed, Latent):
    """The sizes of a model whose router chooses experts by softmax."""

    normalize: ClassVar[bool] = False
    n_experts: int = declared(Count("n_routed_experts"))
    n_experts_used: int = whole("expert_used_count", "num_experts_per_tok", condition=of_all)
    expert_size: int = whole("expert_feed_forward_length", "moe_intermediate_size")
    n_shared: int = whole("expert_shared_count", "n_shared_experts")
    n_dense: int = declared(DenseLayers())
    routed_scale: float = number(("expert_weights_scale", 1.0), "routed_scaling_factor")

    expected = Expected(
        gguf={
            "attention.causal": True, "expert_gating_func": 1, "expert_weights_norm": False,
            "attention.head_count_kv": one_or_all, "expert_group_count": 1, "expert_group_used_count": 1,
        },
        hf={
            "hidden_act": "silu", **llama.NO_BIAS, "num_key_value_heads": one_or_all, "topk_method": "greedy",
            "scoring_func": "softmax", "moe_layer_freq": 1,
        },
        # In this order: a key that DeepSeek-V2's router does not read; settings of groups of experts, which the method
        # "greedy" does not use; sizes that follow from other settings; settings of training.
        harmless=(
            "norm_topk_prob",
            "n_group", "topk_group", "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size",
            "output_router_logits", "router_aux_loss_coef",
        ),
    )  # fmt: skip

    def to_gguf(self) -> dict[str, object]:
        return {**super().to_gguf(), "expert_gating_func": {"softmax": 1, "sigmoid": 2}[self.scoring]}


@dataclass(frozen=True)
class SigmoidConfig(InGroups, Config):
    """The sizes of a model whose router chooses experts by sigmoids plus a bias, within the best groups of experts."""

    scoring: ClassVar[Scoring] = "sigmoid"
    normalize: bool = flag(("expert_weights_norm", True), ("norm_topk_prob", True))  # type: ignore[misc]
    n_groups: int = whole(("expert_group_count", 1), "n_group", condition=divides("n_experts"))
    n_groups_used: int = whole(("expert_group_used_count", 1), "topk_group", condition=of_groups)

    expected = Expected(
        gguf={"attention.causal": True, "expert_gating_func": 2, "attention.head_count_kv": one_or_all},
        hf={
            "hidden_act": "silu", **llama.NO_BIAS, "num_key_value_heads": one_or_all, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "rope_interleave": True, "moe_layer_freq": 1, "partial_rotary_factor": 1.0,
        },
        harmless=Config.expected.harmless,
    )  # fmt: skip


@dataclass(frozen=True)
class DenseConfig(Latent):
    """The sizes of a model whose layers are all dense."""

    expected = Expected(
        gguf={
            "attention.causal": True, "attention.head_count_kv": one_or_all, "expert_count": 0,
            "expert_shared_count": 0, "leading_dense_block_count": same_as("n_layers"),
            "expert_feed_forward_length": same_as("intermediate_size"),
        },
        hf={
            "hidden_act": "silu", **llama.NO_BIAS, "num_key_value_heads": one_or_all, "rope_interleave": True,
            "partial_rotary_factor": 1.0,
        },
        harmless=("head_dim", "qk_head_dim", "embedding_initializer_range"),
    )  # fmt: skip

    @property
    def ffn_kinds(self) -> tuple[str, ...]:
        """The kind of each layer's FFN, for rows of the tensor table."""
        return ("dense",) * self.n_layers

    def to_gguf(self) -> dict[str, object]:
        # llama.cpp requires the keys of experts also for models without experts.
        experts = {"expert_feed_forward_length": self.intermediate_size, "expert_shared_count": 0}
        return {**super().to_gguf(), **experts, "leading_dense_block_count": self.n_layers}


TENSORS = {
    name: row
    for name, row in llama.dense_first(llama.TENSORS).items()
    if (row.when is None and ".attn_" not in name) or "attn_norm" in name
}


def latent_tensors(cfg: Any, checkpoint: Checkpoint, i: int) -> list[Tensor]:
    """Return the attention tensors of layer i. Rows with and without rotary embedding are in separate tensors."""
    D, H, L, R, N, V = cfg.hidden_size, cfg.n_heads, cfg.latent, cfg.rope_dim, cfg.nope_dim, cfg.value_dim
    hf, blk, width = f"model.layers.{i}.self_attn.", f"blk.{i}.", cfg.q_rank or D
    pairs = (*range(0, R, 2), *range(1, R, 2)) if cfg.is_interleaved else tuple(range(R))

    def part(name: str, module: str, gguf: str, order: tuple[int, ...], of: int, columns: int) -> Tensor:
        whole = TensorLayout(f"{hf}{module}.weight", rows=(0, of), order=order)
        return Tensor(
            f"{blk}{name}.weight", whole, (len(order), columns), gguf=replace(whole, name=f"{blk}{gguf}.weight")
        )

    module, gguf = ("q_b_proj", "attn_q_b") if cfg.q_rank else ("q_proj", "attn_q")
    plain = tuple(h * (N + R) + n for h in range(H) for n in range(N))
    rotated = tuple(h * (N + R) + N + r for h in range(H) for r in pairs)
    kv, of_kv = ("kv_a_proj_with_mqa", "attn_kv_a_mqa"), L + R
    made = [
        part("attn_q", module, gguf, plain, H * (N + R), width),
        part("attn_q_pe", module, gguf, rotated, H * (N + R), width),
        part("attn_latent", *kv, tuple(range(L)), of_kv, D),
        part("attn_k_pe", *kv, tuple(L + r for r in pairs), of_kv, D),
        Tensor(f"{blk}attn_kv_a_norm.weight", f"{hf}kv_a_layernorm.weight", (L,)),
        Tensor(f"{blk}attn_output.weight", f"{hf}o_proj.weight", (D, H * V)),
    ]
    if cfg.q_rank:
        made.append(Tensor(f"{blk}attn_q_a.weight", f"{hf}q_a_proj.weight", (cfg.q_rank, D)))
        made.append(Tensor(f"{blk}attn_q_a_norm.weight", f"{hf}q_a_layernorm.weight", (cfg.q_rank,)))
    is_old = cfg.is_joined or f"{blk}attn_kv_b.weight" in checkpoint.shapes
    for h in range(H):
        of_head, of_all_heads = h * (N + V), H * (N + V)
        k = TensorLayout(f"{hf}kv_b_proj.weight", rows=(of_head, of_all_heads), flipped=True)
        v = TensorLayout(f"{hf}kv_b_proj.weight", rows=(of_head + N, of_all_heads))
        old = [replace(of, name=f"{blk}attn_kv_b.weight") for of in (k, v)]
        new = [TensorLayout(f"{blk}attn_{part}_b.weight", expert=(h, H)) for part in "kv"]
        k_gguf, v_gguf = old if is_old else new
        made.append(Tensor(f"{blk}attn_k_b.{h}.weight", k, (L, N), gguf=k_gguf))
        made.append(Tensor(f"{blk}attn_v_b.{h}.weight", v, (V, L), gguf=v_gguf))
    return made


class Model(Decoder):
    def __init__(self, config: Latent, parameters: Parameters, backend: Backend) -> None:
        layers = [
            Layer(
                norm=t.norm("attn_norm"), branches=(Branch(latent_attention(config, t), t.linear("attn_output")),),
                ffn=standard.feed_forward(t, config),
            )
            for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers)


def latent_attention(cfg: Latent, t: LayerTensors) -> LatentAttention:
    p, stem, q_a = t.p, f"blk.{t.i}.", t.linear_or_none("attn_q_a")
    return LatentAttention(
        q_a=q_a, q_norm=None if q_a is None else p.rms_norm(f"{stem}attn_q_a_norm", LATENT_EPS),
        q=t.linear("attn_q"), q_pe=t.linear("attn_q_pe"), latent=t.linear("attn_latent"),
        norm=p.rms_norm(f"{stem}attn_kv_a_norm", LATENT_EPS), k_pe=t.linear("attn_k_pe"),
        k_b=p.expert_linear(f"{stem}attn_k_b", cfg.n_heads), v_b=p.expert_linear(f"{stem}attn_v_b", cfg.n_heads),
        rope=cfg.rope.for_heads(cfg.rope_dim), scores=Scores(cfg.scale), head_dim=cfg.head_dim,
    )  # fmt: skip


def with_latents(made: Plan, checkpoint: Checkpoint) -> Plan:
    """Return the plan `made` plus the attention tensors of all layers."""
    cfg: Any = made.config
    latents = [tensor for i in range(cfg.n_layers) for tensor in latent_tensors(cfg, checkpoint, i)]
    return replace(made, tensors=[*made.tensors, *latents])


def plan(checkpoint: Checkpoint) -> Plan:
    s = Settings(checkpoint.settings, where=checkpoint.where)
    by_softmax, is_dense = checkpoint.architecture == "deepseek_v2", checkpoint.architecture.startswith("youtu")
    if checkpoint.naming == "gguf":
        by_softmax, is_dense = s.whole("expert_gating_func", 1) == 1, not s.whole_or_zero("expert_count")
    if is_dense:
        return with_latents(decoder_plan(checkpoint, DenseConfig, TENSORS, tied=True), checkpoint)
    made = with_latents(decoder_plan(checkpoint, Config if by_softmax else SigmoidConfig, TENSORS), checkpoint)
    names = Names(bias="" if by_softmax else "gate.e_score_correction_bias", shared="shared_experts")
    return standard.with_mixture(made, checkpoint, names)
