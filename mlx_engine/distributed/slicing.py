"""The slices of a planned model that the ranks of tensor parallelism hold, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.backends.parameters import Layer
from mlx_engine.distributed.slices import Slices
from mlx_engine.models import Planned
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Slice:
    """A rank's slice: a `Shard` for outlines."""

    slices: Slices
    rank: int
    size: int

    def own(self, name: str, weight: Weight) -> Weight:
        """Return the part of a tensor that this rank holds."""
        found = self.slices.ranges(name, self.rank, self.size)
        return weight if found is None else weight.cut(*found)

    def is_partial(self, linear: str) -> bool:
        """Return whether the products of a linear layer are parts of a sum."""
        return self.slices.is_partial(linear)

    def has(self, name: str) -> bool:
        """Return whether this rank has a tensor."""
        return self.rank == 0 or not self.slices.is_bias_of_sum(name)

    def layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers."""
        return layers


def sliced(planned: Planned, size: int) -> list[Planned]:
    """Return what each of `size` ranks holds of a model.

    Raises:
        NotShardableError: the model cannot be cut for so many ranks.
    """
    slices = Slices.of(planned)
    slices.check(size)
    return [planned._replace(shard=Slice(slices, rank, size)) for rank in range(size)]
