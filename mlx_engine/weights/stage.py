"""A stage: the layers that one rank of a pipeline runs, and the weights that it therefore reads."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_engine.quant.types import F32, GGMLType

# The weights outside of the layers. What is in neither list is small, and every rank reads it.
FIRST = re.compile(r"(token_embd|position_embd|per_layer_\w+)\.")
LAST = re.compile(r"(output_norm|output)\.")
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Stage:
    """Layers [first, end) of a model of `n_layers`; the first stage embeds tokens, the last one computes logits."""

    first: int
    end: int
    n_layers: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.end == self.n_layers

    def reads(self, name: str, *, is_tied: bool) -> bool:
        """Return whether the stage reads a tensor, by its GGUF name; a tied head is the embedding table."""
        match = _LAYER.match(name)
        if match:
            return self.first <= int(match[1]) < self.end
        if LAST.match(name):
            return self.is_last
        if FIRST.match(name):
            return self.is_first or (is_tied and self.is_last and name.startswith("token_embd."))
        return True


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A weight that another rank has: name and shape are known, the values are zeros, and none is read."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType = F32
    nbytes: int = 0

    def as_type(self, type_: GGMLType) -> Elsewhere:
        """Return the weight as it would be after a conversion."""
        return replace(self, type=type_)

    def dequantize(self) -> np.ndarray:
        """Return zeros, for computations with small vectors while a model is built."""
        return np.zeros(self.shape, dtype=np.float32)


def is_elsewhere(value: Any) -> bool:
    """Return whether a weight belongs to another rank."""
    return isinstance(value, Elsewhere)
