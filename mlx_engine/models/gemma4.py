"""Gemma 4, the text model, without mixtures of experts: E2B, E4B and 31B.

Reference: Hugging Face transformers, models/gemma4. Differences from Gemma 3:

- global layers have heads of another dim, and perhaps another number of KV heads, than local layers; a part of each
  head is rotated; where `attention_k_eq_v` is set, keys and values of global layers are one projection;
- values are normed per head, without a weight; attention scores have the scale 1; logits have a soft cap;
- the last `num_kv_shared_layers` layers attend to the keys and values of the last earlier layer of their kind;
- each layer adds an input of its own (`PerLayer`), made of a second embedding table and of the embeddings;
- each layer's output is multiplied by a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, PerLayer, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import gemma3
from mlx_engine.models.conditions import believable, divides, halves
from mlx_engine.models.config import Declared, Expected, Key, Naming, declared, number, whole
from mlx_engine.models.gemma3 import Layer, LocalLayers, ScaledEmbeddings
from mlx_engine.models.parameters import Parameters
from mlx_engine.models.plan import Plan
from mlx_engine.models.rotation import Rotation
from mlx_engine.models.rotation_setting import LAYER_KINDS, rotation
from mlx_engine.models.settings import HF_HARMLESS, Settings
from mlx_engine.models.table import Row, layer_tensors, padded, parts, tensors

ARCHITECTURES = ("gemma4", "gemma4_text")
GGUF_ARCHITECTURE = "gemma4"

PATTERN = 6
# Keys beside `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HF_HARMLESS,
    *("audio_config", "vision_config", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index"),
    *("eoi_token_id", "image_token_id", "video_token_id", "audio_token_id", "tie_word_embeddings"),
    "vision_soft_tokens_per_image",
}
# The parts of a Hugging Face folder that are not read.
NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")


@dataclass(frozen=True)
class GlobalSize:
    """The setting of a size of global layers: one key, or `per_layer_config` of transformers 5.

    Attributes:
        key: the key.
        each: the key of each layer in `per_layer_config`.
        usual: the default; None for the size of local layers.
    """

    key: str
    each: str
    usual: int | None

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        """Return the size. Without `attention_k_eq_v`, transformers ignores the key of the KV heads."""
        local = int(getattr(known, "head_dim" if self.each == "head_dim" else "n_kv_heads"))
        usual = local if self.usual is None else self.usual
        layers = s.mapping("per_layer_config")
        if layers is None:
            found = s.whole(self.key, usual)
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
        """Return no key: GGUF is not implemented."""
        return {}


@dataclass(frozen=True)
class Kinds(LocalLayers):
    """The setting of which layers are local. The last layer is global, whatever the file says, as in transformers."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        """Return for each layer whether it is local."""
        return (*super().read(s, naming, known)[:-1], False)


def _flag(key: str) -> Any:
    return declared(Key(Settings.flag, None, (key, False)))


def _count(key: str, usual: int) -> Any:
    return declared(Key(Settings.whole_or_zero, None, (key, usual)))


def _same_vocabulary(s: Settings, key: str, config: Any) -> None:
    """Check that both embedding tables have the same number of rows."""
    found = s.whole_or_zero(key, config.vocab_size)
    if config.per_layer_size and found != config.vocab_size:
        raise s.error(key, f"vocab_size, {config.vocab_size}", found)


@dataclass(frozen=True)
class Config(Declared):
    """The sizes of a Gemma 4 model. `head_dim`, `n_kv_heads` and `intermediate_size` are those of the first layers.

    Fields have the defaults of transformers, because a config.json may omit most of them.
    """

    n_layers: int = whole("", ("num_hidden_layers", 30), condition=believable)
    hidden_size: int = whole("", ("hidden_size", 2304))
    intermediate_size: int = whole("", ("intermediate_size", 9216))
    n_heads: int = whole("", ("num_attention_heads", 8))
    n_kv_heads: int = whole("", ("num_key_value_heads", 4), condition=divides("n_heads"))
    head_dim: int = whole("", ("head_dim", 256), condition=halves)
    vocab_size: int = whole("", ("vocab_size", 262_144))
    context_length: int = whole("", ("max_position_embeddings", 131_072))
    norm_eps: float = number("", ("rms_norm_eps", 1e-6))
    rope: Rotation = rotation(theta=1e6, rules=("proportional", "linear"), layers="full_attention")
    local_rope: Rotation = rotation(layers="sliding_attention")
    logit_softcap: float | None = declared(Key(Settings.number_or_none, None, ("final_logit_softcapping", None)))
    window: int = whole("", ("sliding_window", 512))
    is_local: tuple[bool, ...] = declared(Kinds(PATTERN))
    k_is_v: bool = _flag("attention_k_eq_v")
    global_head_dim: int = declared(GlobalSize("global_head_dim", "head_dim", 512))
    n_global_kv_heads: int = declared(GlobalSize("num_global_key_value_heads", "num_key_value_heads", None))
    n_shared: int = _count("num_kv_shared_layers", 0)
    has_wide_ffn: bool = _flag("use_double_wide_mlp")
    per_layer_size: int = _count("hidden_size_per_layer_input", 256)

    expected: ClassVar[Expected] = Expected(
        hf={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": (None, False, "vision"),  # of image tokens alone
            "enable_moe_block": False,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": _same_vocabulary,
        },
        # Of experts, which `enable_moe_block` switches on.
        harmless=("num_experts", "top_k_experts", "moe_intermediate_size"),
    )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for global layers."""
        return tuple(self.window if is_local else None for is_local in self.is_local)

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


# Norm weights are stored as they are, unlike Gemma 3's.
TENSORS = {
    **{name: replace(row, plus=0.0) for name, row in gemma3.TENSORS.items()},
    "blk.*.layer_output_scale.weight": Row("model.layers.*.layer_scalar", "1"),
}
PER_LAYER_TENSORS = {
    "per_layer_token_embd.weight": Row("model.embed_tokens_per_layer.weight", "V LI"),
    "per_layer_model_proj.weight": Row("model.per_layer_model_projection.weight", "LI D"),
    "per_layer_proj_norm.weight": Row("model.per_layer_projection_norm.weight", "I"),
    "blk.*.inp_gate.weight": Row("model.layers.*.per_layer_input_gate.weight", "I D"),
    "blk.*.proj.weight": Row("model.layers.*.per_layer_projection.weight", "D I"),
    "blk.*.post_norm.weight": Row("model.layers.*.post_per_layer_input_norm.weight", "D"),
}
KEYS, VALUES = ("blk.*.attn_k.weight", "blk.*.attn_k_norm.weight"), "blk.*.attn_v.weight"


class Model(ScaledEmbeddings):
    """A Gemma 4 model: local and global layers, shared keys and values, an input for each layer."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        layers = [_layer(config, parameters, i) for i in range(config.n_layers)]
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


def _layer(config: Config, p: Parameters, i: int) -> Layer:
    of, eps, window, shares = config.of_layer(i), config.norm_eps, config.windows[i], config.shares(i)
    rotated = config.rope if window is None else config.local_rope
    per_layer = None
    if config.per_layer_size:
        gate, projection = p.linear(f"blk.{i}.inp_gate"), p.linear(f"blk.{i}.proj")
        norm = p.rms_norm(f"blk.{i}.post_norm", eps)
        columns = i * config.per_layer_size, (i + 1) * config.per_layer_size
        per_layer = PerLayer(config.hidden_size, columns, gate, projection, norm)
    return Layer(
        **parts(p, i, eps),
        rope=rotated.for_heads(of.head_dim),
        window=window,
        scores=Scores(1.0),
        head_dim=of.head_dim,
        n_kv_heads=of.n_kv_heads,
        attn_v_norm=None if shares is not None else p.plain_norm(f"blk.{i}.attn_v_norm", of.head_dim, eps),
        shares=shares,
        per_layer=per_layer,
        output_scale=float(p.values(f"blk.{i}.layer_output_scale").item()),
    )


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented, or the file is a GGUF file.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        raise settings.error("general.architecture", "a Hugging Face folder of Gemma 4", "a GGUF file")
    text = settings.mapping("text_config") or settings
    if text is not settings:
        settings.refuse_rest(AROUND_TEXT)
    config = read(text)
    stem = next((stem for stem in gemma3.STEMS if f"{stem}embed_tokens.weight" in checkpoint.shapes), gemma3.STEMS[0])
    config = padded(config, checkpoint, f"{stem}embed_tokens.weight")
    table = {
        name: replace(row, hf=row.hf.replace(gemma3.STEMS[0], stem))
        for name, row in {**TENSORS, **(PER_LAYER_TENSORS if config.per_layer_size else {})}.items()
    }
    made = tensors(config, {name: row for name, row in table.items() if "*" not in name}, "absent")
    # A second copy of the tied head, the models of images and sounds, and projections that no layer reads.
    unused = ["lm_head.weight", "language_model.lm_head.weight"]
    unused += [name for name in checkpoint.shapes if any(part in name for part in NOT_TEXT) and text is not settings]
    for i in range(config.n_layers):
        absent = _absent(config, i)
        made += layer_tensors(config.of_layer(i), {n: row for n, row in table.items() if n not in absent}, i)
        unused += [table[name].hf.replace("*", str(i)) for name in absent]
    return Plan(config, made, tuple(unused))


def read(s: Settings) -> Config:
    """Return the config of the text model.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    ropes = s.mapping("rope_parameters")
    for kind in LAYER_KINDS:
        if ropes is None or ropes.mapping(kind) is None:
            raise s.error("rope_parameters", f"a mapping with {kind!r}", "nothing")
    config = Config.read(s, "hf")
    expected = halves(config.global_head_dim, config)
    if expected is not None:
        raise s.error("global_head_dim", expected, config.global_head_dim)
    if config.n_heads % config.n_global_kv_heads:
        raise s.error("num_global_key_value_heads", f"a divisor of {config.n_heads}", config.n_global_kv_heads)
    own = config.is_local[: max(0, config.first_shared)]
    if set(own) != set(config.is_local):
        raise s.error("num_kv_shared_layers", "earlier layers of each kind with keys and values", config.n_shared)
    return config


def _absent(config: Config, i: int) -> tuple[str, ...]:
    """Return the tensors that layer i does not have, by their names in the table."""
    if config.shares(i) is not None:
        return (*KEYS, VALUES)
    return (VALUES,) if config.k_is_v and not config.is_local[i] else ()
