"""Cut a row of layers into one run of layers per rank: as evenly as their memory allows, in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple


class _Best(NamedTuple):
    """The largest cost of a rank, the sum of the squares of all, and where each rank begins."""

    largest: float
    squares: float
    starts: tuple[int, ...]


NONE = _Best(math.inf, math.inf, ())


def balanced(
    n_layers: int, n_ranks: int, cuts: Collection[int], cost: Callable[[int, int, int], float]
) -> list[int] | None:
    """Return how many layers each rank has, so that the largest cost is as small as it can be.

    Args:
        n_layers: number of layers, at least one per rank.
        n_ranks: number of ranks.
        cuts: the indices of layers that may be the first of a rank.
        cost: called with (rank, first layer, the layer after the last); infinite where they do not fit.

    Returns:
        The number of layers of each rank; None if every way has an infinite cost.
    """
    best = {0: _Best(0.0, 0.0, ())}
    for rank in range(n_ranks):
        ends = [n_layers] if rank == n_ranks - 1 else sorted(cuts)
        best = {
            end: min(
                (_longer(best[start], cost(rank, start, end), start) for start in best if start < end), default=NONE
            )
            for end in ends
        }
    found = best.get(n_layers, NONE)
    if math.isinf(found.largest):
        return None
    return [end - start for start, end in zip(found.starts, (*found.starts[1:], n_layers), strict=True)]


def _longer(before: _Best, cost: float, start: int) -> _Best:
    return _Best(max(before.largest, cost), before.squares + cost * cost, (*before.starts, start))
