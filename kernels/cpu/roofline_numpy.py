"""The NumPy references of the kernels that measure the machine's limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Two square matrices and their product fit into a core's second-level cache.
SIDE = 192


def read_in_order(words: NDArray[np.int64]) -> int:
    """Return the exclusive or of int64s."""
    return int(np.bitwise_xor.reduce(words))


# NumPy cannot read several streams in one loop.
read = read_in_order


def compute(rounds: int) -> float:
    """Run `rounds` products of square matrices by BLAS, whose loops approach the processor's limit."""
    a, product = np.ones((SIDE, SIDE), dtype=np.float32), np.empty((SIDE, SIDE), dtype=np.float32)
    for _ in range(rounds):
        np.matmul(a, a, out=product)
    return float(product[0, 0]) if rounds else 0.0


def flops(rounds: int) -> int:
    """Return the number of additions and multiplications of `compute(rounds)`."""
    return 2 * rounds * SIDE**3
