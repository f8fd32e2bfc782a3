"""The job of a block of linear layers: its words, and which rows of which matrix a chunk has."""

from __future__ import annotations

from typing import Any

from kernels.cpu.formats import has_four_rows
from kernels.cpu.jit import jit
from kernels.cpu.layout import ACTIVATION, CHUNK, KIND, MATRICES, OWN, ROWS, TABLE, WAYS, WIDTH

# Words of a job: the block's, and X, the address of the input (plain rows for few vectors, packed panels for many), T,
# how many vectors there are, Y and RESIDUAL, where the output and what is added to it lie, and HEIGHT, rows of a chunk.
# A job with many vectors has PIECES chunks for each SPAN of them; one with few has one span.
X, T, Y, RESIDUAL, HEIGHT, PIECES, SPAN = range(OWN, OWN + 7)


@jit
def gates(job: Any) -> Any:
    """Whether the first of two matrices is a gate for the second."""
    return job[ACTIVATION] != 0 and job[MATRICES] == 2


@jit
def matrix_of(job: Any, chunk: int) -> int:
    """The word at which the chunk's matrix begins; a gate's chunks are also those of what it gates."""
    at = TABLE
    for m in range(1, 1 if gates(job) else job[MATRICES]):
        if job[TABLE + m * WIDTH + CHUNK] <= chunk:
            at = TABLE + m * WIDTH
    return at


@jit
def ways(job: Any, m: int) -> int:
    """Of how many stretches of matrix m a chunk has rows: a gate and what it gates share the ways."""
    if job[T] != 1 or not has_four_rows(job[m + KIND]):
        return 1
    if gates(job):
        return WAYS // 2 if job[TABLE + KIND] == job[TABLE + WIDTH + KIND] else 1
    return WAYS


@jit
def ceil_div(n: int, by: int) -> int:
    """The quotient of n and `by`: parts that n is cut into, or the size of each; the last may be smaller."""
    return (n + by - 1) // by


@jit
def number_chunks(job: Any) -> int:
    """Say of each matrix which chunk is its first; how many there are. A gate's rows are those of what it gates."""
    chunks = 0
    for m in range(job[MATRICES]):
        at = TABLE + m * WIDTH
        job[at + CHUNK] = chunks
        if m == 0 or not gates(job):
            n = ways(job, at)
            chunks += ceil_div(ceil_div(job[at + ROWS], n), ceil_div(job[HEIGHT], n))
    return chunks
