"""The NumPy twins of the compiled tiles: which element is multiplied with which, and where the products go."""

from __future__ import annotations

import numpy as np

from kernels.cpu.norms_numpy import Floats

LANES = 16


def multiply_add(
    a: Floats, at: int, row: int, step: int, n_rows: int, b: Floats, b_at: int, c: Floats, c_at: int, n: int
) -> None:
    """`c += a b`: element i of row r of a is `a[at + r row + i step]`; b and c have rows of 16."""
    rows = a[at + row * np.arange(n_rows)[:, None] + step * np.arange(n)]
    panel = b[b_at : b_at + LANES * n].reshape(n, LANES)
    c[c_at : c_at + LANES * n_rows] += (rows @ panel).reshape(-1)


def pack(x: Floats, at: int, row: int, n_rows: int, n: int, factor: float, out: Floats, to: int) -> None:
    """`out[to + 16 i + lane] = factor * x[at + lane * row + i]`; lanes from `n_rows` on are 0."""
    panel = out[to : to + LANES * n].reshape(n, LANES)
    panel[:] = 0
    for lane in range(n_rows):
        first = at + lane * row
        panel[:, lane] = factor * x[first : first + n]
