"""The NumPy twin of the compiled float32 kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def matvec(
    weights: NDArray[np.float32], n_columns: int, x: NDArray[np.float32], y: NDArray[np.float32], first: int, last: int
) -> None:
    """`y[r] = row r . x` for rows first to last - 1."""
    y[first:last] = weights.reshape(-1, n_columns)[first:last] @ x


def four_rows(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32], d: NDArray[np.float32], n_columns: int,
    x: NDArray[np.float32], y: NDArray[np.float32], at: int, apart: int,
) -> None:  # fmt: skip
    """`y[at + i * apart] = row . x` for the rows that begin there."""
    for i, row in enumerate((a, b, c, d)):
        y[at + i * apart] = row[:n_columns] @ x
