"""The grids of the IQ formats: the sets of points, 4 or 8 weights each, of which a file stores the index.

A point's coordinates are taken from a few levels. A grid of K coordinates with L levels has the points
`level[digit 0], ..., level[digit K - 1]` of some numbers below L ** K, in ascending order, where digit 0 is the lowest
digit of the number in base L. `grids.bin` has one bit per number below L ** K, which is 1 if the point is in the grid.

Source of the sets: the tables `iq*_grid`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-common.h
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

_TERNARY, _IQ2, _IQ3 = (-1, 0, 1), (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
# By format: coordinates of a point and levels of a coordinate, in the order of the bitmaps in the file.
_GRIDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "IQ1": (8, _TERNARY),
    "IQ2_XXS": (8, _IQ2),
    "IQ2_XS": (8, _IQ2),
    "IQ2_S": (8, _IQ2),
    "IQ3_XXS": (4, _IQ3),
    "IQ3_S": (4, (1, 3, 5, 7, 9, 11, 13, 15)),
}


@cache
def grid(name: str) -> NDArray[np.float32]:
    """Return the points of a grid, (256 to 2048, 4 or 8), read-only."""
    numbers = np.flatnonzero(np.unpackbits(_bitmaps()[name], bitorder="little"))
    size, levels = _GRIDS[name]
    digits = numbers[:, None] // len(levels) ** np.arange(size) % len(levels)
    points: NDArray[np.float32] = np.array(levels, dtype=np.float32)[digits]
    points.flags.writeable = False
    return points


@cache
def _bitmaps() -> dict[str, NDArray[np.uint8]]:
    data = np.frombuffer(resources.files(__package__).joinpath("grids.bin").read_bytes(), dtype=np.uint8)
    sizes = [-(-(len(levels) ** size) // 8) for size, levels in _GRIDS.values()]
    return dict(zip(_GRIDS, np.split(data, np.cumsum(sizes)[:-1]), strict=True))


def signs(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the signs in the bits of (n, k) bytes, lowest first: 1 for a bit of 0, -1 for a bit of 1, (n, k, 8)."""
    return 1 - 2 * np.unpackbits(bits[..., None], axis=-1, bitorder="little").astype(np.float32)


def with_parity(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Set bit 7 of 7-bit numbers so that the number of ones is even: IQ2_XXS, IQ2_XS and IQ3_XXS leave it out."""
    folded = bits ^ bits >> np.uint8(4)
    folded ^= folded >> np.uint8(2)
    folded ^= folded >> np.uint8(1)
    return bits | folded << np.uint8(7)
