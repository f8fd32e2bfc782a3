"""Qwen3.5 and Qwen3.6, dense, the text model.

Reference: Hugging Face transformers, models/qwen3_5. Three of four layers are gated delta networks ("Gated Delta
Networks", arXiv 2412.06464): a convolution over queries, keys and values, and a matrix per value head as the state. The
other layers have attention as Qwen3 has, with two differences: only the first quarter of each head is rotated, and a
sigmoid gate is multiplied with the output. Norm weights are stored minus 1, except that of the delta rule's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Experts
from mlx_engine.backends.mixers import Convolution, DeltaNet, DeltaRule
from mlx_engine.backends.parameters import Layer, Rope, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    believable,
    convolves,
    declared,
    divides,
    halves,
    n_embeddings,
    number,
    whole,
)
from mlx_engine.config.settings import HARMLESS, Settings
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.qwen3_5_settings import Kinds, RotaryBase, RotaryDim, ValueDim
from mlx_engine.models.qwen3_5_tensors import DELTA, STEMS, table
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Head, parts, tensors

ARCHITECTURES = ("qwen35", "qwen3_5", "qwen3_5_text")
GGUF_ARCHITECTURE = "qwen35"

# Far above any model.
MOST_ROWS = 1 << 20
# The projections of a delta net, in the order of `DeltaNet`.
PROJECTIONS = ("attn_qkv", "delta_gate", "ssm_beta", "ssm_alpha")
# Keys beside `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS,
    "image_token_id",
    "language_model_only",
    "tie_word_embeddings",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
}


# Whether a folder has a matrix for the head, by whether the head is tied.
HEADS: dict[bool, Head] = {True: "absent", False: "required"}


@dataclass(frozen=True)
class Config(ConfigBase):
    """The sizes of a Qwen3.5 model. `kinds` has the kind of each layer; delta nets have heads of their own."""

    n_layers: int = whole("block_count", "num_hidden_layers", condition=believable)
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
    kinds: tuple[str, ...] = declared(Kinds())
    rope_theta: float = declared(RotaryBase())
    rotary_dim: int = declared(RotaryDim())
    conv_width: int = whole("ssm.conv_kernel", ("linear_conv_kernel_dim", 4), condition=convolves)
    key_dim: int = whole("ssm.state_size", ("linear_key_head_dim", 128))
    n_value_heads: int = whole("ssm.time_step_rank", ("linear_num_value_heads", 32))
    n_key_heads: int = whole("ssm.group_count", ("linear_num_key_heads", 16), condition=divides("n_value_heads"))
    value_dim: int = declared(ValueDim())

    expected = Expected(
        gguf={"attention.causal": True, "rope.scaling.type": "none", "nextn_predict_layers": 0},
        hf={
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "mlp_only_layers": [],
        },
        harmless=(
            "mamba_ssm_dtype",  # states are float32 here
            "mtp_num_hidden_layers",  # predicts several tokens at once, beside the model
            "mtp_use_dedicated_embeddings",
        ),
    )

    @property
    def conv_channels(self) -> int:
        """The number of channels of a convolution: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @cached_property
    def rope(self) -> Rope:
        """The frequencies of a head whose rotated elements are first in each half; the others stand still."""
        rotated = Rope.plain(self.rotary_dim, self.rope_theta).frequencies
        return Rope(rotated + (0.0,) * (self.head_dim // 2 - len(rotated)))

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys, without the architecture's prefix."""
        return {**super().to_gguf(), "ssm.inner_size": self.n_value_heads * self.value_dim}


class Model(Decoder):
    """A Qwen3.5 model: gated delta nets, and layers with gated attention."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        layers = [
            _delta_layer(config, parameters, i, self.mixture(config, parameters, i))
            if kind == DELTA
            else _attention_layer(config, parameters, i, self.mixture(config, parameters, i))
            for i, kind in enumerate(config.kinds)
        ]
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)

    @staticmethod
    def mixture(config: Any, p: Parameters, i: int) -> Experts | None:
        """Return the experts of layer i; None if its FFN is dense."""
        return None


def _attention_layer(cfg: Config, p: Parameters, i: int, mixture: Experts | None) -> Layer:
    made, scores = parts(p, i, cfg.norm_eps), Scores(cfg.head_dim**-0.5)
    return Layer(**made, rope=cfg.rope, scores=scores, experts=mixture, activation="silu")


def _delta_layer(cfg: Config, p: Parameters, i: int, mixture: Experts | None) -> Layer:
    made, name = parts(p, i, cfg.norm_eps), f"blk.{i}"
    qkv, gate, beta, step = (p.linear(f"{name}.{part}") for part in PROJECTIONS)
    conv = Convolution(f"{name}.ssm_conv1d", p.array(f"{name}.ssm_conv1d.weight", transposed=True))
    rule = DeltaRule(
        f"{name}.ssm", p.array(f"{name}.ssm_a"), p.array(f"{name}.ssm_dt.bias"), cfg.n_key_heads, cfg.key_dim,
        cfg.n_value_heads, cfg.value_dim,
    )  # fmt: skip
    state = ((cfg.conv_width - 1, cfg.conv_channels), (cfg.n_value_heads, cfg.key_dim, cfg.value_dim))
    norm = p.rms_norm(f"{name}.ssm_norm", cfg.norm_eps)
    mixer = DeltaNet((qkv, gate, beta, step), conv, rule, norm, state)
    output = p.linear(f"{name}.ssm_out")
    return Layer(**made, mixer=mixer, attn_output=output, experts=mixture, activation="silu")


def _check_rows(s: Settings, cfg: Config) -> None:
    """Check the sizes of matrices whose rows are put in another order, before the order is made: a file may be damaged.

    Raises:
        UnsupportedConfigError: a matrix has more rows than any model.
    """
    attention, delta = 2 * cfg.n_heads * cfg.head_dim, cfg.conv_channels
    if max(attention, delta) > MOST_ROWS:
        raise s.error("heads and their widths", f"matrices of at most {MOST_ROWS:,} rows", max(attention, delta))


def plan(checkpoint: Checkpoint, config_type: type[Config] = Config, *, is_dense: bool = True) -> Plan:
    """Return the config and the expected tensors of a checkpoint, without an FFN if it is not dense.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    s = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        config = config_type.read(s, "gguf", checkpoint.n_embeddings)
        _check_rows(s, config)
        return Plan(config, tensors(config, table(config, checkpoint, is_dense=is_dense), "optional"))
    text = s.mapping("text_config") or s
    tied = text.flag("tie_word_embeddings", False)
    if text is not s:
        tied = s.flag("tie_word_embeddings", tied)
        s.refuse_rest(AROUND_TEXT)
    config, head = config_type.read(text, "hf"), HEADS[tied]
    _check_rows(text, config)
    unused = [name for name in checkpoint.shapes if name.startswith(("mtp.", "model.visual.", "vision_tower."))]
    heads = [f"{stem.removesuffix('model.')}lm_head.weight" for stem in STEMS] if tied else []
    return Plan(config, tensors(config, table(config, checkpoint, is_dense=is_dense), head), (*unused, *heads))
