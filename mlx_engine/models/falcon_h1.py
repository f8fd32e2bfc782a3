"""Falcon-H1: attention and a Mamba2 mixer side by side in every layer.

Paper: "Falcon-H1", arXiv 2507.22448. Reference: Hugging Face transformers, models/falcon_h1. Both mixers read the same
normed hidden states, and both outputs are added to the hidden states. config.json has multipliers of activations (from
the parametrization muP). GGUF files have no multipliers, because their weights contain them. In folders of mlx-lm, the
weights contain most multipliers (`as_mlx_has_them`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Mamba2, Scores, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Naming, Setting, constant, declared, said
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama, mamba2, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Gated, Layer, LayerTensors
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row, Table, decoder_plan, tensors

ARCHITECTURES = ("falcon-h1", "falcon_h1")
GGUF_ARCHITECTURE = "falcon-h1"


@dataclass(frozen=True)
class Multipliers(Setting):
    """A setting of n multipliers: in config.json, a number (n = 1) or a list of n numbers. In GGUF files, all are 1."""

    hf: str
    n: int = 1

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[float, ...]:
        if naming == "gguf":
            return (1.0,) * self.n
        if self.n == 1:
            return (s.number(self.hf, 1.0),)
        return tuple(s.numbers(self.hf, self.n, [1.0] * self.n))

    def to_hf(self, value: tuple[float, ...], config: Any) -> Mapping[str, object]:
        return {self.hf: list(value) if self.n > 1 else value[0]}


def gate_first(s: Settings, key: str, config: Any) -> None:
    """Check that mixers with a norm apply the gate before the norm."""
    s.expect(key, *((False,) if config.has_norm else (False, True)))


@dataclass(frozen=True)
class Config(mamba2.Sizes, llama.Config):
    """Llama's settings, the settings of the Mamba2 mixers, and multipliers of activations.

    Attributes:
        attention_in: multiplier of the input of attention.
        attention_out: multiplier of the output of attention.
        space_in: multiplier of the input of a Mamba2 mixer.
        space: multipliers of the mixer's gate, input x, B, C and time steps, in addition to `space_in`.
        space_out: multiplier of the mixer's output.
        ffn: the multiplier of an FFN's gate before the activation, and the multiplier of the FFN's output.
    """

    has_norm: bool = said(("mamba_rms_norm", False))
    of_embeddings: tuple[float, ...] = declared(Multipliers("embedding_multiplier"))
    of_logits: tuple[float, ...] = declared(Multipliers("lm_head_multiplier"))
    attention_in: tuple[float, ...] = declared(Multipliers("attention_in_multiplier"))
    keys: tuple[float, ...] = declared(Multipliers("key_multiplier"))
    attention_out: tuple[float, ...] = declared(Multipliers("attention_out_multiplier"))
    space_in: tuple[float, ...] = declared(Multipliers("ssm_in_multiplier"))
    space: tuple[float, ...] = declared(Multipliers("ssm_multipliers", 5))
    space_out: tuple[float, ...] = declared(Multipliers("ssm_out_multiplier"))
    ffn: tuple[float, ...] = declared(Multipliers("mlp_multipliers", 2))
    attention_bias: bool = constant(False)
    mlp_bias: bool = constant(False)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False,
            "projectors_bias": False, "time_step_limit": mamba2.unlimited,
            "mamba_norm_before_gate": gate_first,
        },
        harmless=(
            "mamba_chunk_size", "mamba_expand", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep",
            "attn_layer_indices", "time_step_max", "time_step_min", "time_step_floor",
        ),
    )  # fmt: skip


MULTIPLIERS = (
    "of_embeddings", "of_logits", "attention_in", "keys", "attention_out", "space_in", "space", "space_out", "ffn",
)  # fmt: skip
LAYER = "model.layers.*."
NAMES = {
    "output_norm.weight": "model.final_layernorm.weight",
    "blk.*.ffn_norm.weight": f"{LAYER}pre_ff_layernorm.weight",
    **{f"blk.*.ffn_{part}.weight": f"{LAYER}feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
}
TENSORS = {
    name: replace(row, hf=NAMES.get(name, row.hf)) for name, row in llama.TENSORS.items() if not name.endswith("bias")
}
# llama.cpp's converter writes this name without ".weight".
TENSORS["blk.*.ffn_norm.weight"] = replace(TENSORS["blk.*.ffn_norm.weight"], gguf="blk.*.ffn_norm")


def table(cfg: Config, checkpoint: Checkpoint) -> Table:
    """Return the tensor table. Its rows have the multipliers that the tensors of GGUF files contain."""
    (into,), (keys,), (logits,) = cfg.attention_in, cfg.keys, cfg.of_logits
    times = {
        "token_embd": cfg.of_embeddings[0], "output": logits, "blk.*.attn_q": into, "blk.*.attn_k": into * keys,
        "blk.*.attn_v": into, "blk.*.attn_output": cfg.attention_out[0], "blk.*.ffn_gate": cfg.ffn[0],
        "blk.*.ffn_down": cfg.ffn[1], "blk.*.ssm_out": cfg.space_out[0],
    }  # fmt: skip
    made: dict[str, Row] = {**TENSORS, **mamba2.rows(cfg, checkpoint, f"{LAYER}mamba.")}
    for name, factor in times.items():
        made[f"{name}.weight"] = replace(made[f"{name}.weight"], times=factor)
    sizes = (cfg.inner, cfg.inner, *(2 * (cfg.n_groups * cfg.state_dim,)), cfg.n_value_heads)
    factors = tuple((n, factor * cfg.space_in[0]) for n, factor in zip(sizes, cfg.space, strict=True))
    of = made["blk.*.ssm_in.weight"]
    made["blk.*.ssm_in.weight"] = replace(of, stored=TensorLayout("", row_times=factors), in_hf=TensorLayout(""))
    norm = made["blk.*.ssm_norm.weight"]
    made["blk.*.ssm_norm.weight"] = replace(norm, when="has_norm")
    return made


class Model(Decoder):
    """A Falcon-H1 model. Some multipliers cost nothing at run time, because other parameters contain them.

    - The weights of a mixer's convolution contain the multipliers of x, B and C.
    - The weights of the last norm contain the multiplier of the logits.
    - The scale of attention scores contains `keys`, and `attention_in` twice: for queries and for keys. Multiplying
      after RoPE gives the same scores, because RoPE is linear.
    - The scale of attention's output contains `attention_out`, and `attention_in` for the values.
    """

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope = standard.rope_of(parameters, config)
        (into,), (keys,), (out,) = config.attention_in, config.keys, config.attention_out
        scores = Scores(into * into * keys * config.head_dim**-0.5)
        layers = [
            Layer(
                norm=t.norm("attn_norm"),
                branches=(
                    Branch(Attention.read(t, config, rope, scores), t.linear("attn_output"), scale=into * out),
                    Branch(_mixer(config, t), t.linear("ssm_out"), scale=config.space_out[0]),
                ),
                ffn=replace(Gated.read(t), scales=(config.ffn[0], config.ffn[1])),
            )
            for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        ]  # fmt: skip
        output_norm = parameters.rms_norm("output_norm", config.norm_eps, config.of_logits[0])
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        x, factor = super().embed(ids, positions), self.config.of_embeddings[0]
        return x if factor == 1 else self.backend.scale(x, factor)


def _mixer(cfg: Config, t: LayerTensors) -> Mamba2:
    gate, inner, b, c, step = (factor * cfg.space_in[0] for factor in cfg.space)
    width = cfg.n_groups * cfg.state_dim
    channels = np.repeat(np.array([inner, b, c], dtype=np.float32), (cfg.inner, width, width))
    return mamba2.mixer(cfg, t, (gate, step), None if (channels == 1).all() else channels)


def as_mlx_has_them(cfg: Config, *, is_tied: bool) -> Config:
    """Return the config for a folder of mlx-lm, whose weights contain most of the multipliers.

    The weights of keys do not contain the multiplier `keys`, and the weights of values do not contain `attention_in`.
    The returned config keeps `keys`, and applies `attention_in` to the output of attention, with the same effect. The
    matrix of a tied head contains the multiplier of the embeddings, so the logits' multiplier is divided by that one.

    Source: mlx-lm 0.32, models/falcon_h1.py: `Model.sanitize`, and the computation of the logits of a tied head.
    """
    changed: dict[str, Any] = {name: (1.0,) * len(getattr(cfg, name)) for name in MULTIPLIERS}
    logits = (cfg.of_logits[0] / cfg.of_embeddings[0],) if is_tied else (1.0,)
    changed |= {"keys": cfg.keys, "attention_out": cfg.attention_in, "of_logits": logits}
    return replace(cfg, **changed)


def plan(checkpoint: Checkpoint) -> Plan:
    made = decoder_plan(checkpoint, Config, partial(table, checkpoint=checkpoint))
    made = standard.with_rotation(checkpoint, made)
    if checkpoint.naming == "gguf":
        return made
    is_tied = all(tensor.name != "output.weight" for tensor in made.tensors)
    if mamba2.is_mlx(checkpoint):
        config = as_mlx_has_them(made.config, is_tied=is_tied)
        found = tensors(config, table(config, checkpoint), "absent" if is_tied else "required")
        made = replace(made, config=config, tensors=found)
    # With a tied head, a GGUF file has one table for embeddings and head, which cannot contain two multipliers.
    # So `in_tensors` is empty, and the conversion to GGUF is refused unless all multipliers are 1.
    return replace(made, in_tensors=() if is_tied else MULTIPLIERS)
