"""Quantise on load: which linear layers become what, and what was done about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.errors import is_whole, require
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.types import GGMLType

KEEP, AUTO = "keep", "auto"
QUANTS = (KEEP, "f32", "q8_0", "q4_0", "q4_1")

# By their GGUF names; a head that is tied to the embedding table is an `output` all the same.
GROUPS = {
    # The last is what GGUF files of GPT-2 have for the first three; a model that is loaded has these.
    "attention": ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv"),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down"),
}
HEAD = "output"
LAYER_TYPES = (*GROUPS["attention"], *GROUPS["ffn"], HEAD)

# The narrowest layer that is multiplied no slower as Q8_0 than as F32, on one thread and on several: read off
# benchmarks/results/crossover.jsonl, which `python -m benchmarks.crossover` measures. It is as narrow as a block, so
# nothing is left by default. A test holds the two together; loading measures nothing.
AUTO_MIN_DIM = 32


def layer_type(name: str) -> str:
    """The type of the linear layer of this name: "attn_q" of "blk.0.attn_q" and of "blk.0.attn_q.weight"."""
    stem = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return HEAD if stem == "token_embd" else stem


@dataclass(frozen=True)
class Conversion:
    """What linear layers are converted to; embedding tables and norms always stay as they are.

    Attributes:
        quant: "keep", or the type for all linear layers and the head.
        min_dim: layers whose longer side is below are left as they are, unless `layers` names them; "auto" is
            AUTO_MIN_DIM. It is about quantising: "f32" has no such limit.
        layers: another type by layer type or group; a layer type goes before its group.

    Raises:
        OptionError: one of them makes no sense.
    """

    quant: str = KEEP
    min_dim: int | str = AUTO
    layers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.quant in QUANTS, option="quant", expected=" or ".join(QUANTS), found=self.quant)
        sound = self.min_dim == AUTO or (is_whole(self.min_dim) and int(self.min_dim) >= 0)
        require(sound, option="quant_min_dim", expected="auto, or a whole number >= 0", found=self.min_dim)
        is_mapping = isinstance(self.layers, Mapping)
        require(is_mapping, option="quant_layers", expected="a mapping from layers to types", found=self.layers)
        names = (*LAYER_TYPES, *GROUPS)
        for name, quant in self.layers.items():
            require(name in names, option="quant_layers", expected=f"layers among {', '.join(names)}", found=name)
            require(quant in QUANTS, option=f"quant_layers {name}", expected=" or ".join(QUANTS), found=quant)

    def check(self, where: str, tensors: Collection[str]) -> None:
        """Every override means a layer of the model with these tensors.

        Raises:
            OptionError: one means none.
        """
        there = [kind for kind in LAYER_TYPES if kind == HEAD or any(layer_type(name) == kind for name in tensors)]
        for name in self.layers:
            found = any(kind in there for kind in GROUPS.get(name, (name,)))
            expected = f"layers that {where} has, among {', '.join(there)}"
            require(found, option="quant_layers", expected=expected, found=name)

    def type_of(self, name: str, shape: tuple[int, ...], stored: GGMLType) -> tuple[GGMLType, str]:
        """The type of a linear layer after loading; where it is left though a type was asked for, also why."""
        given = self._given(layer_type(name))
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

    def _given(self, kind: str) -> str | None:
        groups = [self.layers[group] for group, kinds in GROUPS.items() if kind in kinds and group in self.layers]
        return self.layers.get(kind, groups[0] if groups else None)

    def options(self) -> dict[str, Any]:
        """As `load` takes it."""
        return {"quant": self.quant, "quant_min_dim": self.min_dim, "quant_layers": self.layers}

    def __str__(self) -> str:
        """As the options of a command would say it."""
        parts = [self.quant, *([] if self.min_dim == AUTO else [f"min-dim={self.min_dim}"])]
        return " ".join([*parts, *(f"{name}={quant}" for name, quant in self.layers.items())])


STORED, F32_LAYERS = Conversion(), Conversion("f32")


@dataclass(frozen=True)
class Left:
    """Linear layers that stay as they are stored, for one reason."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Converted:
    """What became of a model's linear layers.

    Attributes:
        asked: the conversion.
        counts: how many were converted, by the name of their new type.
        left: those that were not, though a type was asked for.
    """

    asked: Conversion
    counts: Mapping[str, int]
    left: tuple[Left, ...]

    @classmethod
    def of(cls, asked: Conversion, rows: Sequence[tuple[str, str, str]]) -> Converted:
        """Counted from a row per layer: its name, its new type or "", why it was left or ""."""
        types = [quant for _, quant, _ in rows if quant]
        reasons = dict.fromkeys(reason for _, _, reason in rows if reason)
        left = []
        for reason in reasons:
            names = [name for name, _, why in rows if why == reason]
            left.append(Left(reason, len(names), names[0]))
        return cls(asked, {quant: types.count(quant) for quant in dict.fromkeys(types)}, tuple(left))

    def notes(self) -> tuple[str, ...]:
        """One line for people, or none where nothing was asked for."""
        if self.asked.quant == KEEP and not self.counts and not self.left:
            return ()
        # "keep" with a type for some layers that are of it already: there is no type to name.
        none = f"0 linear layers{'' if self.asked.quant == KEEP else f' to {self.asked.quant}'}"
        done = ", ".join(f"{count} linear layers to {quant}" for quant, count in self.counts.items()) or none
        left = (f", {some.count} left: {some.reason} (first {some.first})" for some in self.left)
        is_float = set(self.counts or [self.asked.quant]) == {"f32"}
        return (f"{'converted' if is_float else 'quantised'} {done}" + "".join(left),)
