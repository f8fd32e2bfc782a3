"""Gemma 4, the text model: E2B, E4B, 31B, and 26B-A4B with a mixture of experts.

Reference: Hugging Face transformers, models/gemma4. Differences from Gemma 3:

- global layers have heads of another dim, and perhaps another number of KV heads, than local layers; a part of each
  head is rotated; where `attention_k_eq_v` is set, keys and values of global layers are one projection;
- values are normed per head, without a weight; attention scores have the scale 1; logits have a soft cap;
- the last `num_kv_shared_layers` layers attend to the keys and values of the last earlier layer of their kind;
- each layer adds an input of its own (`PerLayer`), made of a second embedding table and of the embeddings;
- each layer's output is multiplied by a number;
- in 26B-A4B a mixture of experts lies beside each dense FFN. Both read the same hidden states, each after a norm of its
  own, and are normed and added; the router has a third norm, and each expert a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Experts, Routing
from mlx_engine.backends.parameters import Array, PerLayer, Rope, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Key,
    Naming,
    believable,
    declared,
    divides,
    halves,
    n_embeddings,
    number,
    whole,
)
from mlx_engine.config.rope import LAYER_KINDS, Rotation, rotation
from mlx_engine.config.settings import HARMLESS, Settings
from mlx_engine.models import gemma3, llama
from mlx_engine.models.gemma3 import Layer, ScaledEmbeddings
from mlx_engine.models.gemma4_gguf import FFN, GLOBAL_KV_HEADS, IS_WIDE, K_IS_V, KV_HEADS, SHARED, arrays, flat
from mlx_engine.models.gemma4_settings import KEY_LENGTHS, ExpertSize, GlobalSize, Kinds, count, flag
from mlx_engine.models.gemma4_tensors import planned, table
from mlx_engine.weights.experts import Names, experts, with_experts
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.rope_divisors import FREQUENCIES
from mlx_engine.weights.table import padded, parts, stem_of

ARCHITECTURES = ("gemma4", "gemma4_text")
GGUF_ARCHITECTURE = "gemma4"

PATTERN = 6
# Keys beside `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS,
    *("audio_config", "vision_config", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index"),
    *("eoi_token_id", "image_token_id", "video_token_id", "audio_token_id", "tie_word_embeddings"),
    "vision_soft_tokens_per_image",
    "vocab_size",  # that of `text_config` again, where mlx-lm looks for it
}
# The parts of a Hugging Face folder that are not read.
NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
# The divisor of frequencies that llama.cpp's converter writes for pairs that are not rotated.
NOT_ROTATED = 1e30


def _same_vocabulary(s: Settings, key: str, config: Any) -> None:
    """Check that both embedding tables have the same number of rows."""
    found = s.whole_or_zero(key, config.vocab_size)
    if config.per_layer_size and found != config.vocab_size:
        raise s.error(key, f"vocab_size, {config.vocab_size}", found)


@dataclass(frozen=True)
class Config(ConfigBase):
    """The sizes of a Gemma 4 model. `head_dim`, `n_kv_heads` and `intermediate_size` are those of the first layers.

    Fields have the defaults of transformers, because a config.json may omit most of them.
    """

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
        # Without the key, llama.cpp has a soft cap of 30.
        Key(Settings.number_or_none, ("final_logit_softcapping", 30.0), ("final_logit_softcapping", None))
    )
    window: int = whole("attention.sliding_window", ("sliding_window", 512))
    is_local: tuple[bool, ...] = declared(Kinds(PATTERN))
    k_is_v: bool = flag(K_IS_V, "attention_k_eq_v")
    global_head_dim: int = declared(GlobalSize("global_head_dim", "head_dim", 512, KEY_LENGTHS))
    n_global_kv_heads: int = declared(
        GlobalSize("num_global_key_value_heads", "num_key_value_heads", None, (GLOBAL_KV_HEADS,))
    )
    n_shared: int = count(SHARED, "num_kv_shared_layers", 0)
    has_wide_ffn: bool = flag(IS_WIDE, "use_double_wide_mlp")
    per_layer_size: int = count("embedding_length_per_layer_input", "hidden_size_per_layer_input", 256)
    n_experts: int = declared(ExpertSize("expert_count", "num_experts", is_count=True))
    n_experts_used: int = declared(ExpertSize("expert_used_count", "top_k_experts"))
    expert_size: int = declared(ExpertSize("expert_feed_forward_length", "moe_intermediate_size"))

    expected: ClassVar[Expected] = Expected(
        gguf={"attention.causal": True, "attention.scale": 1.0},
        hf={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": (None, False, "vision"),  # of image tokens alone
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": _same_vocabulary,
        },
        harmless=("output_router_logits", "router_aux_loss_coef"),
    )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for global layers."""
        return tuple(self.window if is_local else None for is_local in self.is_local)

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys, without the architecture's prefix."""
        return arrays(self, super().to_gguf())

    @property
    def first_shared(self) -> int:
        """The first layer without keys and values of its own."""
        return self.n_layers - self.n_shared

    def shares(self, i: int) -> int | None:
        """Return the layer whose keys and values layer i shares; None if it has its own."""
        if i < self.first_shared:
            return None
        return max(j for j in range(self.first_shared) if self.is_local[j] == self.is_local[i])

    def of_layer(self, i: int) -> Config:
        """Return the config with the sizes of layer i."""
        wide = 2 if self.has_wide_ffn and i >= self.first_shared else 1
        of = replace(self, intermediate_size=wide * self.intermediate_size)
        if self.is_local[i]:
            return of
        return replace(of, head_dim=self.global_head_dim, n_kv_heads=self.n_global_kv_heads)


class Model(ScaledEmbeddings):
    """A Gemma 4 model: local and global layers, shared keys and values, an input for each layer."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        everywhere, nearby = config.of_layer(config.n_layers - 1), config.local_rope.for_heads(config.head_dim)
        ropes = llama.rope_of(parameters, cast(Any, everywhere)), nearby
        layers = [_layer(config, parameters, i, ropes[is_local]) for i, is_local in enumerate(config.is_local)]
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        if config.per_layer_size:
            self.input_table = parameters.table("per_layer_token_embd")
            self.input_projection = parameters.linear("per_layer_model_proj")
            self.input_norm = parameters.rms_norm("per_layer_proj_norm", config.norm_eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, logit_softcap=config.logit_softcap
        )

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return (T, D + L*I): the scaled embeddings, and the inputs of all layers, if layers have their own.

        An input is the mean of a projection of the embeddings and of the second table's row, times the root of 2.
        """
        x, be, of = super().embed(ids, positions), self.backend, self.config
        if not of.per_layer_size:
            return x
        projected = be.scale(be.linear(x, self.input_projection), of.hidden_size**-0.5)
        normed = be.merge(be.norm(be.heads(projected, of.per_layer_size), self.input_norm))
        looked_up = be.scale(be.embed(self.input_table, ids), of.per_layer_size**0.5)
        return be.concat(x, be.scale(be.add(normed, looked_up), 2**-0.5))


def _layer(config: Config, p: Parameters, i: int, rope: Rope) -> Layer:
    of, eps, shares = config.of_layer(i), config.norm_eps, config.shares(i)
    per_layer = None
    if config.per_layer_size:
        gate, projection = p.linear(f"blk.{i}.inp_gate"), p.linear(f"blk.{i}.proj")
        norm = p.rms_norm(f"blk.{i}.post_norm", eps)
        columns = i * config.per_layer_size, (i + 1) * config.per_layer_size
        per_layer = PerLayer(config.hidden_size, columns, gate, projection, norm)
    return Layer(
        **parts(p, i, eps),
        experts=_mixture(config, p, i) if config.n_experts else None,
        rope=rope,
        window=config.windows[i],
        scores=Scores(1.0),
        head_dim=of.head_dim,
        n_kv_heads=of.n_kv_heads,
        attn_v_norm=None if shares is not None else p.plain_norm(f"blk.{i}.attn_v_norm", of.head_dim, eps),
        shares=shares,
        per_layer=per_layer,
        output_scale=float(p.values(f"blk.{i}.layer_output_scale").item()),
    )


def _mixture(config: Config, p: Parameters, i: int) -> Experts:
    routing = Routing(config.n_experts_used, normalize=True, scales=p.vector(f"blk.{i}.ffn_down_exps_scale"))
    return replace(
        experts(p, i, config.n_experts, routing, "gelu"),
        router_norm=p.rms_norm(f"blk.{i}.ffn_gate_inp_norm", config.norm_eps, config.hidden_size**-0.5),
        post_norm=p.rms_norm(f"blk.{i}.post_ffw_norm_2", config.norm_eps),
    )


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    if checkpoint.naming == "gguf":
        config = read(flat(checkpoint), "gguf", checkpoint.n_embeddings)
        factors = Tensor(f"{FREQUENCIES}.weight", "", (config.global_head_dim // 2,), required=False)
        return with_mixture(checkpoint, planned(config, table(config), (), factors))
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    text = settings.mapping("text_config") or settings
    if text is not settings:
        settings.refuse_rest(AROUND_TEXT)
    config = read(text)
    stem = stem_of(checkpoint, gemma3.STEMS)
    config = padded(config, checkpoint, f"{stem}embed_tokens.weight")
    # A second copy of the tied head, and the models of images and sounds.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    unused += [name for name in checkpoint.shapes if any(part in name for part in NOT_TEXT) and text is not settings]
    made = with_mixture(checkpoint, planned(config, table(config, stem), unused), stem)
    # GGUF has no key for the part of a head that is rotated: pairs that are not rotated have a huge divisor.
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
        raise s.error("num_kv_shared_layers", "earlier layers of each kind with keys and values", config.n_shared)
    return config
