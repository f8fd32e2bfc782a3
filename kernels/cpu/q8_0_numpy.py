"""The NumPy twins of the compiled Q8_0 kernels: what they compute, a few rows at a time, for any machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels import blocks as layout


def matvec(
    blocks: NDArray[np.uint8], n_columns: int, x: NDArray[np.float32], y: NDArray[np.float32], first: int, last: int
) -> None:
    """`y[r] = row r . x` for rows first to last - 1."""
    rows = blocks.view(layout.Q8_0).reshape(-1, n_columns // 32)[first:last]
    products = np.einsum("rbk,bk->rb", rows["qs"].astype(np.float32), x.reshape(-1, 32))
    y[first:last] = (products * rows["d"].astype(np.float32)).sum(axis=1)


def matvec_4(
    blocks: NDArray[np.uint8], n_columns: int, x: NDArray[np.float32], y: NDArray[np.float32], y_row: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """`y[v * y_row + r] = row r . x[v]` for four vectors."""
    for v in range(4):
        matvec(blocks, n_columns, x[v * n_columns : (v + 1) * n_columns], y[v * y_row :], first, last)


def four_rows(
    a: NDArray[np.uint8], b: NDArray[np.uint8], c: NDArray[np.uint8], d: NDArray[np.uint8], n_columns: int,
    x: NDArray[np.float32], y: NDArray[np.float32], at: int, apart: int,
) -> None:  # fmt: skip
    """`y[at + i * apart] = row . x` for the rows that begin there."""
    size = n_columns // 32 * layout.Q8_0.itemsize
    for i, row in enumerate((a, b, c, d)):
        matvec(row[:size], n_columns, x, y[at + i * apart :], 0, 1)


def dequantize(blocks: NDArray[np.uint8], first: int, last: int, out: NDArray[np.float32], to: int) -> None:
    """`d * q` for blocks first to last - 1."""
    some = blocks.view(layout.Q8_0)[first:last]
    place = out[to : to + 32 * (last - first)].reshape(-1, 32)
    np.multiply(some["qs"], some["d"].astype(np.float32)[:, None], out=place)
