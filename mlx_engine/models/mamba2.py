"""Mamba2.

Paper: "Transformers are SSMs", arXiv 2405.21060. Reference: Hugging Face transformers, models/mamba2. A layer projects
its normed hidden states to a gate, to time steps, and to the inputs x, B and C of a state space model. x, B and C are
convolved over the last few tokens. The output of the state space model is gated, then normed. There is no attention and
no FFN. Hybrid models with Mamba2 mixers import `Sizes`, `HeadDim`, `rows` and `mixer` from this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Convolution, Mamba2, StateSpace
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    Naming,
    Setting,
    convolves,
    declared,
    divides,
    n_embeddings,
    n_layers,
    number,
    said,
    whole,
)
from mlx_engine.config.settings import Settings
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Branch, Layer, LayerTensors
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table, decoder_plan

ARCHITECTURES = ("mamba2",)
GGUF_ARCHITECTURE = "mamba2"

# The kind of layers with a Mamba2 mixer. Hybrid models may also have layers with attention, or with only an FFN.
MAMBA = "mamba"


@dataclass(frozen=True)
class HeadDim(Setting):
    """The setting of a mixer's head dim. GGUF files have the width of all heads together (`Sizes.to_gguf`).

    Attributes:
        hf: the key in config.json.
        inner: the key in config.json for the width of all heads together; None if there is no such key.
        usual: the default of the head dim in config.json.
    """

    hf: str
    inner: str | None = None
    usual: int = 64

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        if naming == "hf":
            head_dim = s.whole(self.hf, self.usual)
            if self.inner is not None:
                s.expect(self.inner, head_dim * known.n_value_heads)
            return head_dim
        inner = s.whole("ssm.inner_size")
        if inner % known.n_value_heads:
            raise s.error("ssm.inner_size", f"a multiple of {known.n_value_heads}", inner)
        return int(inner // known.n_value_heads)

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.hf: value} | ({} if self.inner is None else {self.inner: value * config.n_value_heads})


def unlimited(s: Settings, key: str, config: Any) -> None:
    """Check that the range of time steps, if present, is [0, infinity], which transformers writes in two forms."""
    s.expect(key, None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True)
class Sizes(ConfigBase):
    """The sizes of Mamba2 mixers. The keys in config.json are those of hybrid models; `Config` has those of Mamba2."""

    conv_width: int = whole("ssm.conv_kernel", ("mamba_d_conv", 4), condition=convolves)
    state_dim: int = whole("ssm.state_size", ("mamba_d_state", 256))
    n_value_heads: int = whole("ssm.time_step_rank", ("mamba_n_heads", 128))
    n_groups: int = whole(("ssm.group_count", 1), ("mamba_n_groups", 1), condition=divides("n_value_heads"))
    value_dim: int = declared(HeadDim("mamba_d_head", "mamba_d_ssm"))
    conv_bias: bool = said(("mamba_conv_bias", True))

    @property
    def inner(self) -> int:
        """The width of all heads together."""
        return self.n_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """The number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.n_groups * self.state_dim

    @property
    def mamba_rows(self) -> int:
        """The number of rows of the input projection: the gate, the channels of the convolution, and the time steps."""
        return self.inner + self.conv_channels + self.n_value_heads

    def to_gguf(self) -> dict[str, object]:
        return {**super().to_gguf(), "ssm.inner_size": self.inner}


def rows(cfg: Any, checkpoint: Checkpoint, prefix: str, kind: str | None = None) -> Table:
    """Return the table rows of a mixer's tensors. In folders, the names of the tensors begin with `prefix`.

    `kind` is the kind of layers that have the tensors; None means all layers.
    """
    C, W, H = cfg.conv_channels, cfg.conv_width, cfg.n_value_heads
    conv = TensorLayout("", outer=(C, W, 1) if is_mlx(checkpoint) else (C, 1, W))
    column, plain = TensorLayout("", outer=(H, 1)), TensorLayout("")
    made = {
        "blk.*.ssm_in.weight": Row(f"{prefix}in_proj.weight", "M D"),
        "blk.*.ssm_conv1d.weight": Row(f"{prefix}conv1d.weight", "C W", in_hf=conv),
        "blk.*.ssm_conv1d.bias": Row(f"{prefix}conv1d.bias", "C", when="conv_bias"),
        "blk.*.ssm_dt.bias": Row(f"{prefix}dt_bias", "U"),
        "blk.*.ssm_a": Row(f"{prefix}A_log", "U", stored=column, in_hf=TensorLayout("", is_log=True)),
        "blk.*.ssm_d": Row(f"{prefix}D", "U", stored=column, in_hf=plain),
        "blk.*.ssm_norm.weight": Row(
            f"{prefix}norm.weight", "UP", stored=TensorLayout("", outer=(cfg.n_groups, cfg.inner // cfg.n_groups)),
            in_hf=plain,
        ),
        "blk.*.ssm_out.weight": Row(f"{prefix}out_proj.weight", "D UP"),
    }  # fmt: skip
    return {name: replace(row, kind=kind) for name, row in made.items()}


def is_mlx(checkpoint: Checkpoint) -> bool:
    """Return whether mlx-lm has written the folder: convolution weights are then (C, W, 1), else (C, 1, W)."""
    shape = next((shape for name, shape in checkpoint.shapes.items() if name.endswith("conv1d.weight")), ())
    return checkpoint.naming == "hf" and len(shape) == 3 and shape[1] > 1 == shape[2]


def mixer(
    cfg: Any, t: LayerTensors, scales: tuple[float, float] = (1.0, 1.0), channels: NDArray[np.float32] | None = None
) -> Mamba2:
    """Return the Mamba2 mixer of a layer.

    `scales` are factors of the gate and of the time steps. `channels` (C,) has a factor for each channel of the
    convolution's input.
    """
    p, name = t.p, f"blk.{t.i}"
    bias = p.array(f"{name}.ssm_conv1d.bias") if f"{name}.ssm_conv1d.bias" in p else None
    conv = Convolution(
        f"{name}.ssm_conv1d", p.array(f"{name}.ssm_conv1d.weight", transposed=True, times=channels), bias
    )
    space = StateSpace(
        f"{name}.ssm", p.array(f"{name}.ssm_a"), p.array(f"{name}.ssm_dt.bias"), p.array(f"{name}.ssm_d"),
        cfg.n_value_heads, cfg.value_dim, cfg.n_groups, cfg.state_dim,
    )  # fmt: skip
    norm = t.rms_norm("ssm_norm") if t.has("ssm_norm") else None
    state = ((cfg.conv_width - 1, cfg.conv_channels), (cfg.n_value_heads, cfg.state_dim, cfg.value_dim))
    return Mamba2(t.linear("ssm_in"), conv, space, norm, cfg.n_groups, state, scales)


# ---- the model Mamba2, which has no other mixers ----


@dataclass(frozen=True)
class Config(Sizes):
    conv_width: int = whole("ssm.conv_kernel", ("conv_kernel", 4), condition=convolves)
    state_dim: int = whole("ssm.state_size", ("state_size", 128))
    n_value_heads: int = whole("ssm.time_step_rank", ("num_heads", 128))
    n_groups: int = whole(("ssm.group_count", 1), ("n_groups", 8), condition=divides("n_value_heads"))
    n_layers: int = n_layers()
    hidden_size: int = whole("embedding_length", "hidden_size")
    value_dim: int = declared(HeadDim("head_dim"))
    conv_bias: bool = said(("use_conv_bias", True))
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    # A state space model has no limit on the context; the default is the number that llama.cpp's converter writes.
    context_length: int = whole("context_length", ("max_position_embeddings", 1 << 20))
    norm_eps: float = number("attention.layer_norm_rms_epsilon", ("layer_norm_epsilon", 1e-5))

    expected = Expected(
        gguf={"attention.head_count": 0, "feed_forward_length": 0},
        hf={"hidden_act": "silu", "use_bias": False, "time_step_limit": unlimited, "rms_norm": True},
        harmless=(
            "chunk_size", "expand", "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_max",
            "time_step_min", "time_step_rank",
        ),
    )  # fmt: skip

    @property
    def kinds(self) -> tuple[str, ...]:
        return (MAMBA,) * self.n_layers

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys; llama.cpp also requires keys for the absent attention and FFN."""
        return {**super().to_gguf(), "attention.head_count": 0, "feed_forward_length": 0}


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        layers = [
            Layer(norm=t.norm("attn_norm"), branches=(Branch(mixer(config, t), t.linear("ssm_out")),))
            for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        ]
        super().__init__(config, parameters, backend, layers=layers)


LAYER = "backbone.layers.*."
TENSORS = {
    "token_embd.weight": Row("backbone.embeddings.weight", "V D"),
    "output_norm.weight": Row("backbone.norm_f.weight", "D"),
    "output.weight": Row("lm_head.weight", "V D"),
    "blk.*.attn_norm.weight": Row(f"{LAYER}norm.weight", "D"),
}


def plan(checkpoint: Checkpoint) -> Plan:
    return decoder_plan(checkpoint, Config, lambda cfg: {**TENSORS, **rows(cfg, checkpoint, f"{LAYER}mixer.")})
