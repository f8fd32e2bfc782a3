"""Rows of a matrix by number: the vectors of tokens. The NumPy twin is indexing what has been expanded."""

from __future__ import annotations

from kernels.cpu.formats import expand
from kernels.cpu.jit import entry
from kernels.cpu.memory import floats, words


@entry
def embed(kind: int, weights: int, n_columns: int, ids: int, n: int, out: int) -> None:
    """`out[i] = row ids[i]` of the matrix at address `weights`, expanded; (n, n_columns) float32 at address `out`."""
    rows, y = words(ids), floats(out)
    for i in range(n):
        expand(kind, weights, n_columns, rows[i], 0, n_columns, y, i * n_columns)
