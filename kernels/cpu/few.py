"""Products with few vectors: rows are multiplied as they are stored, for memory is the limit.

A processor looks ahead along several rows at once, each in its own place, and then reads faster than along one: so with
one vector a chunk has rows of several stretches of its matrix, which are multiplied in turns.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.activations import activate, gated
from kernels.cpu.formats import four_rows, matvecs, row_bytes
from kernels.cpu.jit import jit, task
from kernels.cpu.layout import ACTIVATION, BIAS, CHUNK, COLUMN, FEW, KIND, LANES, ROWS, WEIGHTS, WIDTH, K, N
from kernels.cpu.linear_job import HEIGHT, RESIDUAL, T, X, Y, ceil_div, gates, matrix_of, ways
from kernels.cpu.memory import floats
from kernels.cpu.vectors import get, load, put, store


@jit
def _row(job: Any, m: int, row: int) -> Any:
    """The address of a row, or of the last one behind the end: the last stretch may be shorter than the others."""
    return job[m + WEIGHTS] + min(row, job[m + ROWS] - 1) * row_bytes(job[m + KIND], job[K])


@jit
def _rows_as_stored(job: Any, m: int, first: int, n: int, sums: int, size: int, room: int) -> None:
    """`sums[t * size + r] = row (first + r) . x[t]` of matrix m for r below n."""
    # The kernels write to y[row]; this makes row `first` the first element.
    start = sums - 4 * first
    matvecs(job[m + KIND], job[m + WEIGHTS], job[K], job[T], job[X], start, size, first, first + n, room)


@jit
def _rows_in_turns(job: Any, m: int, first: int, apart: int, n: int, sums: Any, size: int) -> None:
    """`sums[w * size + r] = row (first + w * apart + r) . x` of matrix m for four stretches w.

    Two stretches of a gate are followed by the same two of what it gates.
    """
    other, after = (m + WIDTH, 0) if gates(job) else (m, 2 * apart)
    for r in range(first, first + n):
        a, b = _row(job, m, r), _row(job, m, r + apart)
        c, d = _row(job, other, r + after), _row(job, other, r + after + apart)
        four_rows(job[m + KIND], job[K], a, b, c, d, job[X], sums, r - first, size)


@jit
def _put(job: Any, m: int, t: int, first: int, n: int, products: Any, at: int) -> None:
    """Write n products of vector t, from `products[at]` on, plus bias, activated, plus residual."""
    place = 4 * (t * job[N] + job[m + COLUMN] + first)
    y = floats(job[Y] + place)
    if job[m + BIAS] != 0:
        bias = floats(job[m + BIAS] + 4 * first)
        for r in range(n):
            put(products, at + r, get(products, at + r) + get(bias, r))
    if job[ACTIVATION] != 0 and not gates(job):
        for r in range(at, at + n, LANES):
            store(products, r, activate(job[ACTIVATION], load(products, r)))
    if job[RESIDUAL] != 0:
        residual = floats(job[RESIDUAL] + place)
        for r in range(n):
            put(y, r, get(products, at + r) + get(residual, r))
    else:
        for r in range(n):
            put(y, r, get(products, at + r))


@task
def multiply_few(job: Any, chunk: int, scratch: int) -> None:
    """The rows of one chunk with every vector: `y[t, column + r] = row r . x[t]`, plus bias, activated, plus residual.

    Of a gate, `y[t, r] = activation(gate row r . x[t]) * (up row r . x[t])`.
    """
    m = matrix_of(job, chunk)
    n_ways, n_matrices = ways(job, m), 2 if gates(job) else 1
    height, apart = ceil_div(job[HEIGHT], n_ways), ceil_div(job[m + ROWS], n_ways)
    first = (chunk - job[m + CHUNK]) * height
    n = min(height, apart - first)
    # Scratch memory: products in whole vectors, (T or ways, size) of each matrix, then what a format needs.
    size, products = ceil_div(height, LANES) * LANES, floats(scratch)
    half = size * (n_ways if n_ways > 1 else FEW)
    if n_ways > 1:
        _rows_in_turns(job, m, first, apart, n, products, size)
    else:
        for i in range(n_matrices):
            _rows_as_stored(job, m + i * WIDTH, first, n, scratch + 4 * i * half, size, scratch + 8 * half)
    for i in range(job[T] * n_ways):
        at, row = i * size, i % n_ways * apart + first
        if n_matrices == 2:
            for r in range(at, at + n, LANES):
                store(products, r, gated(job[ACTIVATION], load(products, r), load(products, half + r)))
        _put(job, m, i // n_ways, row, min(n, job[m + ROWS] - row), products, at)
