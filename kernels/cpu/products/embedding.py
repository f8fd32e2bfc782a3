"""Embedding lookup: expanded rows of a matrix by number. The NumPy twin is indexing the expanded matrix."""

from __future__ import annotations

from ..build.jit import entry
from ..build.jobs import scratch_of
from ..build.layout import LANES, THREADS
from ..build.memory import words
from ..build.vectors import PART
from ..formats.format import expand


@entry
def embed(address: int, matrix: int, n_columns: int, ids: int, n: int, out: int) -> None:
    """`out[i] = row ids[i]` of a matrix, expanded; `out` is (n, n_columns) float32.

    All arrays are addresses; `address` is that of the pool's control block, `matrix` that of the matrix's words.
    """
    control, rows = words(address), words(ids)
    room = scratch_of(control, control[THREADS])
    for i in range(n):
        expand(words(matrix), 0, n_columns, rows[i], 0, n_columns, out, i * n_columns, LANES, PART, room)
