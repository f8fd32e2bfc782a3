"""Embedding lookup: expanded rows of a matrix by number. The NumPy twin is indexing the expanded matrix."""

from __future__ import annotations

from kernels.cpu.formats import expand
from kernels.cpu.jit import entry
from kernels.cpu.jobs import scratch_of
from kernels.cpu.layout import LANES, THREADS
from kernels.cpu.memory import floats, words
from kernels.cpu.vectors import PART


@entry
def embed(address: int, kind: int, weights: int, n_columns: int, ids: int, n: int, out: int) -> None:
    """`out[i] = row ids[i]` of the matrix at address `weights`, expanded; `out` is (n, n_columns) float32.

    All arrays are addresses; `address` is that of the pool's control block.
    """
    control, rows, y = words(address), words(ids), floats(out)
    room = scratch_of(control, control[THREADS])
    for i in range(n):
        expand(kind, weights, n_columns, rows[i], 0, n_columns, y, i * n_columns, LANES, PART, room)
