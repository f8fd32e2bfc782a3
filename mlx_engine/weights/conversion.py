"""Quantise linear layers on load: choose a type for each layer, and report the conversion.

`Conversion` has the options `quant`, `quant_min_dim` and `quant_layers` of `load`. `quant_layers` names layers by a
layer type such as `attn_q`, or by a group of layer types such as `attention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlx_engine.errors import OptionError, is_whole, listed, shown
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.types import GGMLType

# The layer types of latent attention. The tensor `attn_q` or `attn_q_b` is loaded as two layers, `attn_q` and
# `attn_q_pe`, and the tensor `attn_kv_a_mqa` as `attn_latent` and `attn_k_pe`. The matrices per head, `attn_k_b` and
# `attn_v_b`, keep their type.
_LATENT = ("attn_q_a", "attn_q_b", "attn_q_pe", "attn_kv_a_mqa", "attn_latent", "attn_k_pe")

# Maps each group to its layer types, which have GGUF names. The output head has the layer type `output`, even if it is
# tied to the embedding table.
GROUPS = {
    # In GGUF files such as GPT-2's, attn_q, attn_k and attn_v are one tensor, attn_qkv. It is loaded as three layers.
    "attention": ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", *_LATENT),
    # The projections of layers with a recurrent state. LFM2's `in_proj` is loaded as `in_gate`, `out_gate` and `value`;
    # Qwen3-Next's `ssm_ba` as `ssm_beta` and `ssm_alpha`, its `ssm_in` as `attn_qkv` and `delta_gate`.
    "mixer": (
        "in_gate",
        "out_gate",
        "value",
        "in_proj",
        "out_proj",
        "delta_gate",
        "ssm_alpha",
        "ssm_beta",
        "ssm_out",
        "ssm_ba",
        "ssm_in",
    ),
    # The experts of a layer have the same layer types. Routers (ffn_gate_inp) are never quantised. If a GGUF file
    # has ffn_gate_up_exps, this tensor is loaded as ffn_gate_exps and ffn_up_exps.
    "ffn": (
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_gate_up_exps",
        "ffn_down_exps",
        "ffn_gate_shexp",
        "ffn_up_shexp",
        "ffn_down_shexp",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ),
    # Gemma 4's per-layer inputs (`layer.PerLayer`). Only the command `quantize` converts per_layer_token_embd, their
    # embedding table.
    "per_layer": ("inp_gate", "proj", "per_layer_model_proj", "per_layer_token_embd"),
}
HEAD = "output"
LAYER_TYPES = (*(name for group in GROUPS.values() for name in group), HEAD)


def layer_type(name: str) -> str:
    """Return the layer type of a name: "attn_q" for "blk.0.attn_q.weight", "ffn_up_exps" for "blk.0.ffn_up_exps.3"."""
    *_, before, last = ("", *name.removesuffix(".weight").split("."))
    stem = before if last.isdigit() else last
    return HEAD if stem == "token_embd" else stem


KEEP, AUTO = "keep", "auto"
QUANTS = (KEEP, "f32", "q8_0", "q4_0", "q4_1")
# For layers of at least this width, Q8_0 is at least as fast as F32, with one thread and with several: measured by
# `python -m benchmarks.crossover` (benchmarks/results/crossover.jsonl). The quantised types have blocks of this width,
# and narrower rows fill no block. So the default `min_dim` excludes no layer that could be quantised.
AUTO_MIN_DIM = 32


@dataclass(frozen=True)
class Conversion:
    """The types to which linear layers are converted on load. Embedding tables and norms are never converted on load.

    Attributes:
        quants: the valid values of `quant`.
        layer_quants: the valid types in `layers`.
        quant: "keep", or the type for all linear layers and the head.
        min_dim: layers whose matrix has both sides shorter than this are not quantised, unless `layers` names them.
            "auto" is AUTO_MIN_DIM. The type "f32" is applied to layers of every size.
        layers: maps layer types or groups to a type that overrides `quant`; a layer type overrides its group.

    Raises:
        OptionError: an option is invalid.
    """

    quants: ClassVar[tuple[str, ...]] = QUANTS
    layer_quants: ClassVar[tuple[str, ...]] = QUANTS

    quant: str = KEEP
    min_dim: int | str = AUTO
    layers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quant not in self.quants:
            message = f"quant: unknown type {shown(self.quant)}; choose {listed(self.quants)}"
            raise OptionError(message, option="quant", expected=listed(self.quants), found=self.quant)
        if self.min_dim != AUTO and not (is_whole(self.min_dim) and int(self.min_dim) >= 0):
            message = f"quant_min_dim must be auto or a whole number of at least 0, not {shown(self.min_dim)}"
            raise OptionError(message, option="quant_min_dim", found=self.min_dim)
        if not isinstance(self.layers, Mapping):
            message = f"quant_layers must map layers to types, not be {shown(self.layers)}"
            raise OptionError(message, option="quant_layers", found=self.layers)
        names = (*LAYER_TYPES, *GROUPS)
        for name, quant in self.layers.items():
            if name not in names:
                message = f"quant_layers: no layer {shown(name)}; choose {listed(names)}"
                raise OptionError(message, option="quant_layers", expected=listed(names), found=name)
            if quant not in self.layer_quants:
                message = f"quant_layers: unknown type {shown(quant)} of {name}; choose {listed(self.layer_quants)}"
                raise OptionError(message, option=f"quant_layers {name}", found=quant)

    def check(self, where: str, tensors: Collection[str]) -> None:
        """Raise OptionError if `layers` names a layer that a model with these tensors does not have."""
        if not self.layers:
            return
        found = {layer_type(name) for name in tensors} | {HEAD}
        there = [kind for kind in LAYER_TYPES if kind in found]
        for name in self.layers:
            if not any(kind in there for kind in GROUPS.get(name, (name,))):
                message = f"quant_layers: {where} has no layer {name!r}; it has {', '.join(there)}"
                raise OptionError(message, option="quant_layers", expected=", ".join(there), found=name)

    def type_of(self, name: str, shape: tuple[int, ...], stored: GGMLType) -> tuple[GGMLType, str]:
        """Return the type of a linear layer after loading, and why it is not converted.

        The reason is "" if the layer is converted, or if neither `quant` nor `layers` asks for a type.
        """
        given = self.given(layer_type(name))
        quant = self.quant if given is None else given
        if quant == KEEP:
            return stored, "" if self.quant == KEEP else "kept as asked"
        wanted, least = BY_NAME[quant.upper()], AUTO_MIN_DIM if self.min_dim == AUTO else int(self.min_dim)
        if wanted == stored:
            return stored, f"already {quant}"
        if shape[-1] % wanted.block_size:
            return stored, f"rows do not fill blocks of {wanted.block_size}"
        if given is None and wanted.block_size > 1 and max(shape) < least:
            return stored, f"no side of {least} or more"
        return wanted, ""

    def given(self, kind: str) -> str | None:
        """Return the type that `layers` has for a layer type or its group; None if `layers` names neither."""
        groups = [self.layers[group] for group, kinds in GROUPS.items() if kind in kinds and group in self.layers]
        return self.layers.get(kind, groups[0] if groups else None)

    def options(self) -> dict[str, Any]:
        """Return this conversion as keyword arguments of `load`."""
        return {"quant": self.quant, "quant_min_dim": self.min_dim, "quant_layers": self.layers}

    def __str__(self) -> str:
        """Return the options in the syntax of the commands."""
        parts = [self.quant, *([] if self.min_dim == AUTO else [f"min-dim={self.min_dim}"])]
        return " ".join([*parts, *(f"{name}={quant}" for name, quant in self.layers.items())])


STORED, F32_LAYERS = Conversion(), Conversion("f32")


def check_load_options(
    quant: str,
    threads: int | None,
    quant_min_dim: int | str = AUTO,
    quant_layers: Mapping[str, str] | None = None,
) -> Conversion:
    """Check these options of `load`; raise OptionError if one is invalid. Return the conversion that they describe."""
    conversion = Conversion(quant, quant_min_dim, {} if quant_layers is None else quant_layers)
    if threads is not None and not is_whole(threads):
        message = f"threads must be a whole number, not {shown(threads)}"
        raise OptionError(message, option="threads", found=threads)
    if threads is not None and threads < 1:
        raise OptionError("threads must be at least 1", option="threads", expected="at least 1", found=threads)
    return conversion


@dataclass(frozen=True)
class Left:
    """A reason why layers were not converted, the number of these layers, and the name of the first one."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Converted:
    """The report of a conversion.

    Attributes:
        asked: the requested conversion.
        counts: maps the name of a type to the number of layers that were converted to this type.
        left: layers that were not converted although a type was requested, one entry per reason.
        nbytes: maps the name of a type to the bytes of its weights, after the conversion and before a backend expands
            them.
    """

    asked: Conversion
    counts: Mapping[str, int]
    left: tuple[Left, ...]
    nbytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """The type with the most bytes, and the bytes of all weights: "Q8_0, 16.2 MB of weights"."""
        most = max(self.nbytes, key=lambda name: self.nbytes[name], default="none")
        return f"{most}, {sum(self.nbytes.values()) / 1e6:,.1f} MB of weights"

    @classmethod
    def of(
        cls, asked: Conversion, rows: Sequence[tuple[str, str, str]], nbytes: Mapping[str, int] | None = None
    ) -> Converted:
        """Return the report. `rows` has one tuple per layer: (name, new type, reason why it is not converted).

        The type is "" if the layer is not converted. The reason may be "", as in `Conversion.type_of`.
        """
        names: dict[str, list[str]] = {}
        for name, _, reason in rows:
            if reason:
                names.setdefault(reason, []).append(name)
        left = tuple(Left(reason, len(of), of[0]) for reason, of in names.items())
        return cls(asked, Counter(quant for _, quant, _ in rows if quant), left, nbytes or {})

    def notes(self) -> tuple[str, ...]:
        """Return one line for the user, or none if no conversion was requested."""
        if self.asked.quant == KEEP and not self.counts and not self.left:
            return ()
        # If no layer was converted, name the requested type, unless it is "keep".
        none = f"0 linear layers{'' if self.asked.quant == KEEP else f' to {self.asked.quant}'}"
        done = ", ".join(f"{count} linear layers to {quant}" for quant, count in self.counts.items()) or none
        left = (f", {some.count} left: {some.reason} (first {some.first})" for some in self.left)
        is_float = set(self.counts or [self.asked.quant]) == {"f32"}
        return (f"{'converted' if is_float else 'quantised'} {done}" + "".join(left),)
