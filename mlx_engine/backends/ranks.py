"""The ranks that share the tensors of a model, as backends see them; `mlx_engine/distributed/group.py` has them."""

from __future__ import annotations

from typing import Protocol

from mlx_engine.backends.parameters import Native


class Ranks(Protocol):
    """Several ranks, of which this process is one. Arrays are of NumPy or of MLX, as the argument is.

    Attributes:
        rank: the number of this process.
        size: the number of ranks.
    """

    rank: int
    size: int

    def gather(self, array: Native) -> Native:
        """Return the arrays of all ranks (size, ...), which have one shape, in the order of the ranks."""

    def sum(self, array: Native) -> Native:
        """Return the sum over all ranks, added in the order of the ranks."""
