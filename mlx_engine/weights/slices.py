"""The slices of a model's tensors that one of several ranks holds; `mlx_engine/distributed/tensor.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_engine.quant.weight import Weight


class OwnSlices(Protocol):
    """What of a model's tensors this rank holds."""

    def own(self, name: str, weight: Weight) -> Weight:
        """Return the part of a tensor that this rank holds, which may be all of it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a tensor."""

    def is_partial(self, linear: str) -> bool:
        """Return whether the products of a linear layer are parts of a sum over all ranks."""

    def has(self, name: str) -> bool:
        """Return whether this rank has a tensor: one rank alone adds the bias of a sum."""

    def layers(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Return the layers, made from this rank's tensors, with the numbers of heads that it has."""
