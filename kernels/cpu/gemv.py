"""Products with one vector (gemv): rows are multiplied as they are stored, for memory is the limit.

A processor looks ahead along several rows at once, each in its own place, and then reads faster than along one: so a
chunk has rows of several stretches of its matrix, which are multiplied in turns.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.activations import gated
from kernels.cpu.epilogue import put_row
from kernels.cpu.formats import FORMAT_ROOM, four_rows, row_bytes
from kernels.cpu.jit import jit, task
from kernels.cpu.layout import ACTIVATION, CHUNK, KIND, LANES, ROWS, WEIGHTS, WIDTH, K
from kernels.cpu.linear_job import HEIGHT, WAYS, X, ceil_div, gates, matrix_of
from kernels.cpu.memory import floats
from kernels.cpu.vectors import load, store


@jit
def _row(job: Any, m: int, row: int) -> Any:
    """The address of a row, or of the last one behind the end: the last stretch may be shorter than the others."""
    return job[m + WEIGHTS] + min(row, job[m + ROWS] - 1) * row_bytes(job[m + KIND], job[K])


@task
def multiply_vector(job: Any, chunk: int, scratch: int) -> None:
    """The rows of one chunk: `y[column + r] = row r . x`, plus bias, activated, plus residual.

    Of a gate, `y[r] = activation(gate row r . x) * (up row r . x)`: then two stretches of the gate are followed by the
    same two of what it gates.
    """
    m = matrix_of(job, chunk)
    height, apart = ceil_div(job[HEIGHT], job[WAYS]), ceil_div(job[m + ROWS], job[WAYS])
    first = (chunk - job[m + CHUNK]) * height
    n = min(height, apart - first)
    other, after = (m + WIDTH, 0) if gates(job) else (m, 2 * apart)
    # Scratch memory: room that formats need, then products in whole vectors, (4, size).
    size, products = ceil_div(height, LANES) * LANES, floats(scratch + FORMAT_ROOM)
    for r in range(first, first + n):
        a, b = _row(job, m, r), _row(job, m, r + apart)
        c, d = _row(job, other, r + after), _row(job, other, r + after + apart)
        four_rows(job[m + KIND], job[K], a, b, c, d, job[X], products, r - first, size, scratch)
    for way in range(job[WAYS]):
        at, row = way * size, way * apart + first
        if gates(job):
            for r in range(at, at + n, LANES):
                store(products, r, gated(job[ACTIVATION], load(products, r), load(products, r + 2 * size)))
        put_row(job, m, 0, row, min(n, job[m + ROWS] - row), products, at)
