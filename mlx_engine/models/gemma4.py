"""Gemma 4, the text model: E2B, E4B, 31B, and 26B-A4B with a mixture of experts.

Reference: Hugging Face transformers, models/gemma4. Differences from Gemma 3:

- global layers (which attend to all tokens) have another head dim than local layers, and may have another number of KV
  heads; RoPE rotates a part of each head of a global layer; with `attention_k_eq_v`, global layers have one projection
  for keys and values;
- values are normed per head, without a weight; attention scores have the scale 1; logits have a soft cap;
- the last `num_kv_shared_layers` layers compute no keys and values: they attend to the keys and values of the last
  layer of the same kind (local or global) that computes keys and values;
- unless `hidden_size_per_layer_input` is 0, each layer adds a per-layer input (`layer.PerLayer`), computed from a
  second embedding table and the embeddings;
- each layer's output is multiplied by a number, which is a weight of the layer;
- in 26B-A4B each layer has a mixture of experts in parallel with a dense FFN. Both read the same hidden states, each
  after its own norm; their outputs are normed and added. The router's input has a third norm, and the output of each
  expert is multiplied by a factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import Array, Rope, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Key,
    Naming,
    Setting,
    believable,
    declared,
    divides,
    flag,
    halves,
    n_embeddings,
    number,
    whole,
    whole_or_zero,
)
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import LAYER_KINDS, Rotation, rotation
from mlx_engine.config.settings import HARMLESS, MOST_LAYERS, Settings
from mlx_engine.models import gemma3
from mlx_engine.models.gemma3 import ScaledEmbeddings
from mlx_engine.models.layer import (
    Attention,
    Branch,
    Gated,
    GatedAndMixture,
    Layer,
    LayerTensors,
    Mixture,
    PerLayer,
    SharedAttention,
)
from mlx_engine.models.standard import rope_of
from mlx_engine.weights.experts import Names, experts, most_experts, with_experts
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.rope_divisors import FREQUENCIES
from mlx_engine.weights.table import Row, Table, layer_tensors, padded, stem_of, tensors

ARCHITECTURES = ("gemma4", "gemma4_text")
GGUF_ARCHITECTURE = "gemma4"

PATTERN = 6
# Keys next to `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS, "audio_config", "vision_config", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
    "eoi_token_id", "image_token_id", "video_token_id", "audio_token_id", "tie_word_embeddings",
    "vision_soft_tokens_per_image", "vocab_size",  # repeats `vocab_size` of `text_config`; mlx-lm reads it here
}  # fmt: skip
# Tensors with these parts in their names belong to the encoders of images and audio, which are not read.
NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
# For pairs of elements that RoPE does not rotate, llama.cpp's converter writes this divisor of the pair's frequency.
NOT_ROTATED = 1e30

# ---- arrays with a value per layer in GGUF files, where config.json has one value per kind of layer ----
# Reference: llama.cpp, src/models/gemma4.cpp. `flat` replaces the array of KV heads by one number for local and one for
# global layers, and the array of FFN sizes by the first size and a flag (whether layers that compute no keys and values
# have twice this size); `arrays` restores the arrays. GGUF files have no key for whether global layers have one
# projection for keys and values; like llama.cpp, `flat` derives this from the tensors.

FFN, KV_HEADS, SHARED = "feed_forward_length", "attention.head_count_kv", "attention.shared_kv_layers"
IS_LOCAL = "attention.sliding_window_pattern"
# Keys that only this module uses; files do not have them.
GLOBAL_KV_HEADS, IS_WIDE, K_IS_V = "global kv heads", "wide ffn", "k is v"


def flat(checkpoint: Checkpoint) -> Settings:
    """Return the settings of a GGUF file with single values in place of the arrays of KV heads and FFN sizes.

    Raises:
        UnsupportedConfigError: layers of one kind (local or global) have different numbers of KV heads; FFN sizes are
            neither equal, nor doubled in exactly the layers that compute no keys and values; or the number of layers,
            their kinds, or the number of layers that compute no keys and values is invalid.
    """
    found = dict(checkpoint.settings)
    s = Settings(found, where=checkpoint.where)
    n = s.whole("block_count")
    if n > MOST_LAYERS:
        raise s.error("block_count", f"at most {MOST_LAYERS:,}", n)
    is_local, own = s.flags(IS_LOCAL, n), n - s.whole_or_zero(SHARED)
    if is_local is None:
        raise s.error(IS_LOCAL, f"{n} flags", "nothing")
    if own < 1:
        raise s.error(SHARED, f"fewer than all {n} layers", n - own)
    kv_heads, widths = (_each(s, found, key, n, checkpoint.where) for key in (KV_HEADS, FFN))
    local = {size for size, here in zip(kv_heads, is_local, strict=True) if here} or set(kv_heads)
    everywhere = {size for size, here in zip(kv_heads, is_local, strict=True) if not here} or set(kv_heads)
    if len(local) > 1 or len(everywhere) > 1:
        raise s.error(KV_HEADS, "one number for local layers and one for global layers", kv_heads)
    is_wide = own < n and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (2 if is_wide and i >= own else 1) for i in range(n)]:
        raise s.error(FFN, "one width, or twice the width in layers that share keys and values", widths)
    k_is_v = any(
        not here and f"blk.{i}.attn_v.weight" not in checkpoint.shapes for i, here in enumerate(is_local[:own])
    )
    found |= {FFN: widths[0], IS_WIDE: is_wide, K_IS_V: k_is_v}
    found |= {KV_HEADS: local.pop(), GLOBAL_KV_HEADS: everywhere.pop()}
    return Settings(found, where=checkpoint.where)


def _each(s: Settings, found: Mapping[str, object], key: str, n: int, where: str) -> list[int]:
    """Return the setting `key` as n whole numbers: the elements of an array, or a single number repeated n times."""
    value: Any = found.get(key)
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list):
        return [s.whole(key)] * n
    each = Settings({str(i): size for i, size in enumerate(values)}, where=f"{where}: {key}")
    if len(values) != n:
        raise s.error(key, f"{n} whole numbers", value)
    return [each.whole(str(i)) for i in range(n)]


def arrays(config: Config, keys: Mapping[str, object]) -> dict[str, object]:
    """Return the GGUF settings `keys` of a config, with arrays in place of the keys that only this module uses."""
    made = {key: value for key, value in keys.items() if key not in (GLOBAL_KV_HEADS, IS_WIDE, K_IS_V)}
    sizes = [config.of_layer(i) for i in range(config.n_layers)]
    if config.has_wide_ffn:
        made[FFN] = [of.intermediate_size for of in sizes]
    if config.n_global_kv_heads != config.n_kv_heads:
        made[KV_HEADS] = [of.n_kv_heads for of in sizes]
    return made


# ---- settings that are read from several keys ----

KEY_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


@dataclass(frozen=True)
class GlobalSize(Setting):
    """The setting of a size of global layers: the head dim or the number of KV heads.

    config.json has a key for this size or, since transformers 5, `per_layer_config` with the sizes of each layer.

    Attributes:
        key: the key in config.json.
        each: the key in each layer's entry of `per_layer_config`.
        usual: the default; if None, the default is the size of local layers.
        gguf: the GGUF keys, which must all have the same value.
    """

    key: str
    each: str
    usual: int | None
    gguf: tuple[str, ...]

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "gguf":
            size = s.whole(self.gguf[0])
            for key in self.gguf[1:]:
                s.expect(key, size)
            return size
        local = int(getattr(known, "head_dim" if self.each == "head_dim" else "n_kv_heads"))
        usual = local if self.usual is None else self.usual
        layers = s.mapping("per_layer_config")
        if layers is None:
            found = s.whole(self.key, usual)
            # Without `attention_k_eq_v`, transformers ignores the key for the number of KV heads of global layers.
            return found if self.each == "head_dim" or known.k_is_v else local
        s.whole_or_none(self.key, None)
        sizes = {}
        for i in range(known.n_layers):
            of = layers.mapping(str(i))
            sizes[i] = local if of is None else of.whole(self.each, local)
            if of is not None:
                of.refuse_rest(("head_dim", "num_key_value_heads"))
        layers.refuse_rest()
        everywhere = {sizes[i] for i, is_local in enumerate(known.is_local) if not is_local}
        if len(everywhere) > 1 or any(sizes[i] != local for i, is_local in enumerate(known.is_local) if is_local):
            raise s.error("per_layer_config", f"one {self.each} in local layers and one in global layers", sizes)
        return everywhere.pop() if everywhere else local

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return dict.fromkeys(self.gguf, value)

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.key: value}


@dataclass(frozen=True)
class ExpertSize(Setting):
    """The setting of a size of the mixture of experts; `is_count` means that the size is the number of experts.

    If `enable_moe_block` in config.json is false, the model has no experts: `read` checks the size, and returns 0.
    """

    gguf: str
    hf: str
    is_count: bool = False

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "hf" and not s.flag("enable_moe_block", False):
            s.whole_or_zero(self.hf)
            return 0
        key = self.gguf if naming == "gguf" else self.hf
        n_experts = s.whole_or_zero(key) if self.is_count else known.n_experts
        if n_experts > most_experts(known.n_layers):
            raise s.error(key, f"at most {most_experts(known.n_layers):,}", n_experts)
        return s.whole(key) if n_experts or naming == "hf" else s.whole_or_zero(key)

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {self.gguf: value} if value else {}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.hf: value or None, "enable_moe_block": config.n_experts > 0}


def _same_vocabulary(s: Settings, key: str, config: Any) -> None:
    """Check that both embedding tables have the same number of rows."""
    found = s.whole_or_zero(key, config.vocab_size)
    if config.per_layer_size and found != config.vocab_size:
        raise s.error(key, f"vocab_size, {config.vocab_size}", found)


@dataclass(frozen=True)
class Config(ConfigBase):
    """The sizes of a Gemma 4 model. Fields have transformers' defaults, because a config.json may omit keys."""

    n_layers: int = whole("block_count", ("num_hidden_layers", 30), condition=believable)
    hidden_size: int = whole("embedding_length", ("hidden_size", 2304))
    intermediate_size: int = whole(FFN, ("intermediate_size", 9216))
    n_heads: int = whole("attention.head_count", ("num_attention_heads", 8))
    n_kv_heads: int = whole(KV_HEADS, ("num_key_value_heads", 4), condition=divides("n_heads"))
    head_dim: int = whole(
        "attention.key_length_swa", ("head_dim", 256),
        repeated=("attention.value_length_swa", "rope.dimension_count_swa"), condition=halves,
    )  # fmt: skip
    vocab_size: int = whole(("vocab_size", n_embeddings), ("vocab_size", 262_144))
    context_length: int = whole("context_length", ("max_position_embeddings", 131_072))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("rms_norm_eps", 1e-6))
    rope: Rotation = rotation(theta=1e6, rules=("proportional", "linear"), layers="full_attention")
    local_rope: Rotation = rotation(gguf="rope.freq_base_swa", layers="sliding_attention")
    logit_softcap: float | None = declared(
        # Without the key, llama.cpp uses a soft cap of 30.
        Key(Settings.number_or_none, ("final_logit_softcapping", 30.0), ("final_logit_softcapping", None))
    )
    window: int = whole("attention.sliding_window", ("sliding_window", 512))
    is_local: tuple[bool, ...] = layer_kinds(
        PATTERN, interval={"hf": "sliding_window_pattern"}, flags={"gguf": IS_LOCAL}, ends_with_second=True
    )
    k_is_v: bool = flag((K_IS_V, False), ("attention_k_eq_v", False))
    global_head_dim: int = declared(GlobalSize("global_head_dim", "head_dim", 512, KEY_LENGTHS))
    n_global_kv_heads: int = declared(
        GlobalSize("num_global_key_value_heads", "num_key_value_heads", None, (GLOBAL_KV_HEADS,))
    )
    n_shared: int = whole_or_zero((SHARED, 0), ("num_kv_shared_layers", 0))
    has_wide_ffn: bool = flag((IS_WIDE, False), ("use_double_wide_mlp", False))
    per_layer_size: int = whole_or_zero(("embedding_length_per_layer_input", 0), ("hidden_size_per_layer_input", 256))
    n_experts: int = declared(ExpertSize("expert_count", "num_experts", is_count=True))
    n_experts_used: int = declared(ExpertSize("expert_used_count", "top_k_experts"))
    expert_size: int = declared(ExpertSize("expert_feed_forward_length", "moe_intermediate_size"))

    expected: ClassVar[Expected] = Expected(
        gguf={"attention.causal": True, "attention.scale": 1.0},
        hf={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": (None, False, "vision"),  # "vision": only among image tokens
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": _same_vocabulary,
        },
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )

    def to_gguf(self) -> dict[str, object]:
        return arrays(self, super().to_gguf())

    @property
    def first_shared(self) -> int:
        """The index of the first layer that reads the keys and values of an earlier layer; n_layers if none does."""
        return self.n_layers - self.n_shared

    def shares(self, i: int) -> int | None:
        """Return the layer whose keys and values layer i reads; None if layer i computes its own."""
        if i < self.first_shared:
            return None
        return max(j for j in range(self.first_shared) if self.is_local[j] == self.is_local[i])

    def of_layer(self, i: int) -> Config:
        """Return a config with the sizes of layer i."""
        wide = 2 if self.has_wide_ffn and i >= self.first_shared else 1
        of = replace(self, intermediate_size=wide * self.intermediate_size)
        if self.is_local[i]:
            return of
        return replace(of, head_dim=self.global_head_dim, n_kv_heads=self.n_global_kv_heads)


# ---- tensors: their names, and which of them a layer has ----
# Folders store the norm weights themselves; Gemma 3's folders store them minus 1. `weights/experts.py` adds the
# matrices of the router and of the experts.

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
    """Return the tensor table of a model; `stem` is the prefix of the text model's tensors in a folder."""
    found = {**TENSORS, **(PER_LAYER_TENSORS if config.per_layer_size else {})}
    found |= EXPERT_TENSORS if config.n_experts else {}
    return {name: replace(row, hf=row.hf.replace(gemma3.STEMS[0], stem)) for name, row in found.items()}


def planned(config: Config, table: Table, unused: Sequence[str], *more: Tensor) -> Plan:
    """Return the plan of a table's tensors. `more` has further tensors of a GGUF file, and is empty for a folder.

    The file may also have the tensors in `unused` and those that `_absent` returns; they are not read.
    """
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
    """Return the names, in `table`, of the tensors for keys and values that layer i does not use."""
    if config.shares(i) is not None:
        return (*KEYS, VALUES)
    return (VALUES,) if config.k_is_v and not config.is_local[i] else ()


class Model(ScaledEmbeddings):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        everywhere, nearby = config.of_layer(config.n_layers - 1), config.local_rope.for_heads(config.head_dim)
        ropes = rope_of(parameters, cast(Any, everywhere)), nearby
        tensors = LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        layers = [_layer(config, t, ropes[is_local]) for t, is_local in zip(tensors, config.is_local, strict=True)]
        if config.per_layer_size:
            self.input_table = parameters.table("per_layer_token_embd")
            self.input_projection = parameters.linear("per_layer_model_proj")
            self.input_norm = parameters.rms_norm("per_layer_proj_norm", config.norm_eps)
        super().__init__(config, parameters, backend, layers=layers, logit_softcap=config.logit_softcap)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return the scaled embeddings (T, D). If there are per-layer inputs, append those of all L layers (T, L*I).

        A per-layer input is (a + b) / sqrt(2). Here a is the layer's part of a projection of the scaled embeddings,
        normed, and b is the layer's part of the token's row in the second table, times the square root of I.
        """
        x, be, of = super().embed(ids, positions), self.backend, self.config
        if not of.per_layer_size:
            return x
        projected = be.scale(be.linear(x, self.input_projection), of.hidden_size**-0.5)
        normed = be.merge(be.norm(be.heads(projected, of.per_layer_size), self.input_norm))
        looked_up = be.scale(be.embed(self.input_table, ids), of.per_layer_size**0.5)
        return be.concat(x, be.scale(be.add(normed, looked_up), 2**-0.5))


def _layer(config: Config, t: LayerTensors, rope: Rope) -> Layer:
    branch = Branch(_attention(config, t, rope), t.linear("attn_output"), t.norm("post_attention_norm"))
    gated = Gated.read(t, "gelu")
    return Layer(
        norm=t.norm("attn_norm"), branches=(branch,),
        ffn=_with_experts(config, t, gated) if config.n_experts else gated,
        input=_input(config, t) if config.per_layer_size else None,
        scale=float(t.p.values(f"blk.{t.i}.layer_output_scale").item()),
    )  # fmt: skip


def _attention(config: Config, t: LayerTensors, rope: Rope) -> Attention | SharedAttention:
    of, shared, scores = config.of_layer(t.i), config.shares(t.i), Scores(1.0)
    if shared is None:
        v_norm = t.p.plain_norm(f"blk.{t.i}.attn_v_norm", of.head_dim, t.eps)
        return replace(Attention.read(t, of, rope, scores, config.windows[t.i]), v_norm=v_norm)
    return SharedAttention(
        q=t.linear("attn_q"), norm=t.rms_norm("attn_q_norm"), rope=rope, scores=scores, head_dim=of.head_dim,
        layer=shared,
    )  # fmt: skip


def _input(config: Config, t: LayerTensors) -> PerLayer:
    columns = t.i * config.per_layer_size, (t.i + 1) * config.per_layer_size
    gate, projection = t.linear("inp_gate"), t.linear("proj")
    return PerLayer(config.hidden_size, columns, gate, projection, t.rms_norm("post_norm"))


def _with_experts(config: Config, t: LayerTensors, gated: Gated) -> GatedAndMixture:
    routing = Routing(config.n_experts_used, normalize=True, scales=t.p.vector(f"blk.{t.i}.ffn_down_exps_scale"))
    mixture = replace(
        experts(t.p, t.i, config.n_experts, routing, "gelu"),
        router_norm=t.rms_norm("ffn_gate_inp_norm", config.hidden_size**-0.5),
        post_norm=t.rms_norm("post_ffw_norm_2"),
    )
    return GatedAndMixture(
        gated=replace(gated, post=None), gated_post=t.norm("post_ffw_norm_1"),
        mixture=Mixture(t.norm("pre_ffw_norm_2"), mixture), post=t.norm("post_ffw_norm"),
    )  # fmt: skip


def plan(checkpoint: Checkpoint) -> Plan:
    if checkpoint.naming == "gguf":
        config = read(flat(checkpoint), "gguf", checkpoint.n_embeddings)
        factors = Tensor(f"{FREQUENCIES}.weight", "", (config.global_head_dim // 2,), required=False)
        return with_mixture(checkpoint, planned(config, table(config), (), factors))
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    text = gemma3.text_settings(settings, AROUND_TEXT)
    config = read(text)
    stem = stem_of(checkpoint, gemma3.STEMS)
    config = padded(config, checkpoint, f"{stem}embed_tokens.weight")
    # Tensors of the folder that are not read: the head (a copy of the embedding table), and the encoders of images and
    # audio.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    unused += [name for name in checkpoint.shapes if any(part in name for part in NOT_TEXT) and text is not settings]
    made = with_mixture(checkpoint, planned(config, table(config, stem), unused), stem)
    # GGUF has no key for the rotated part of a head. Instead, the frequencies of unrotated pairs have a huge divisor.
    rope = config.rope.for_heads(config.global_head_dim)
    plain = Rope.plain(config.global_head_dim, config.rope.theta)
    divisors = [f / slow if slow else NOT_ROTATED for f, slow in zip(plain.frequencies, rope.frequencies, strict=True)]
    return replace(made, in_tensors=("rope",), gguf_only={f"{FREQUENCIES}.weight": divisors})


def with_mixture(checkpoint: Checkpoint, made: Plan, stem: str = gemma3.STEMS[0]) -> Plan:
    """Return the plan with the tensors of the experts, if the model has any."""
    names = Names(block="", router="router.proj", is_fused=True, stacked="experts.switch_glu", stem=stem)
    return with_experts(made, checkpoint, names, made.config.expert_size) if made.config.n_experts else made


def read(s: Settings, naming: Naming = "hf", n_embeddings: int = 1) -> Config:
    """Return the config of the text model.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    ropes = s.mapping("rope_parameters")
    for kind in LAYER_KINDS if naming == "hf" else ():
        if ropes is None or ropes.mapping(kind) is None:
            raise s.error("rope_parameters", f"a mapping with {kind!r}", "nothing")
    config = Config.read(s, naming, n_embeddings)
    expected = halves(config.global_head_dim, config)
    if expected is not None:
        raise s.error("global_head_dim", expected, config.global_head_dim)
    if config.n_heads % config.n_global_kv_heads:
        raise s.error("num_global_key_value_heads", f"a divisor of {config.n_heads}", config.n_global_kv_heads)
    if config.n_experts_used > config.n_experts:
        raise s.error("top_k_experts", f"at most the number of experts, {config.n_experts}", config.n_experts_used)
    own = config.is_local[: max(0, config.first_shared)]
    if set(own) != set(config.is_local):
        raise s.error("num_kv_shared_layers", "less, so that each kind of layer has keys and values", config.n_shared)
    return config
