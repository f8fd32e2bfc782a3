"""The part of a model that one of several ranks (processes) has: layers of a pipeline stage, or slices of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight

# Outside of the layers, the first stage reads the weights whose names FIRST matches, and the last stage those whose
# names LAST matches. All other weights outside of the layers are small, and every stage reads them.
FIRST = re.compile(r"(token_embd|position_embd|per_layer_\w+)\.")
LAST = re.compile(r"(output_norm|output)\.")
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers [first, end) of a model of `n_layers` layers."""

    first: int
    end: int
    n_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.end == self.n_layers

    def reads(self, name: str, *, is_tied: bool) -> bool:
        """Return whether the stage reads a tensor, by its GGUF name.

        If `is_tied`, the last stage also reads the embedding table, because the table is also the matrix of the head.
        """
        match = _LAYER.match(name)
        if match:
            return self.first <= int(match[1]) < self.end
        if LAST.match(name):
            return self.is_last
        if FIRST.match(name):
            return self.is_first or (is_tied and self.is_last and name.startswith("token_embd."))
        return True


@dataclass(frozen=True, eq=False)
class RemoteWeight:
    """A placeholder for a weight that only another rank reads; its values are zeros."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType = F32
    nbytes: int = 0

    def as_type(self, type_: GGMLType) -> RemoteWeight:
        """Return a placeholder of another type."""
        return replace(self, type=type_)

    def dequantize(self) -> np.ndarray:
        """Return zeros, for computations with small vectors during loading."""
        return np.zeros(self.shape, dtype=np.float32)


def is_elsewhere(value: Any) -> bool:
    """Return whether a weight belongs to another rank."""
    return isinstance(value, RemoteWeight)


class OwnSlices(Protocol):
    """The parts of a model's tensors that this rank holds."""

    def own(self, name: str, weight: Weight) -> Weight:
        """Return this rank's part of a tensor, which may be the whole tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a tensor."""

    def is_partial(self, linear: str) -> bool:
        """Return whether the products of a linear layer are partial sums, which are added over all ranks."""

    def has(self, name: str) -> bool:
        """Return whether this rank has a tensor. Only one rank has the bias of a layer that `is_partial`."""

    def layers(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Return the layers with this rank's numbers of heads and channels in place of the model's."""
