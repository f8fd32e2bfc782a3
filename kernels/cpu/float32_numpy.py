"""The NumPy twin of the compiled float32 kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def matvec(
    weights: NDArray[np.float32], n_columns: int, x: NDArray[np.float32], y: NDArray[np.float32], first: int, last: int
) -> None:
    """`y[r] = row r . x` for rows first to last - 1."""
    y[first:last] = weights.reshape(-1, n_columns)[first:last] @ x
