"""The job of a block of linear layers: its words, and which rows of which matrix a chunk has."""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import jit
from kernels.cpu.layout import ACTIVATION, CHUNK, MATRICES, OWN, ROWS, TABLE, WIDTH

# Words of a job: the block's, and X, the address of the input, whose rows begin STRIDE elements apart, T, how many of
# them there are, Y and RESIDUAL, where the output and what is added to it lie, HEIGHT, rows of a matrix in a chunk, and
# WAYS, from how many stretches of a matrix they are. There are PIECES chunks for each SPAN of rows of the input.
X, STRIDE, T, Y, RESIDUAL, HEIGHT, WAYS, PIECES, SPAN = range(OWN, OWN + 9)


@jit
def gates(job: Any) -> Any:
    """Whether the first of two matrices is a gate for the second."""
    return job[ACTIVATION] != 0 and job[MATRICES] == 2


@jit
def matrix_of(job: Any, chunk: int) -> int:
    """Return the word at which the chunk's matrix begins; a gate's chunks are also those of what it gates."""
    at = TABLE
    for m in range(1, 1 if gates(job) else job[MATRICES]):
        if job[TABLE + m * WIDTH + CHUNK] <= chunk:
            at = TABLE + m * WIDTH
    return at


@jit
def ceil_div(n: int, by: int) -> int:
    """The quotient of n and `by`: parts that n is cut into, or the size of each; the last may be smaller."""
    return (n + by - 1) // by


@jit
def number_chunks(job: Any) -> int:
    """Write the first chunk of each matrix; return how many there are. A gate's rows are those of what it gates."""
    chunks = 0
    for m in range(job[MATRICES]):
        at = TABLE + m * WIDTH
        job[at + CHUNK] = chunks
        if m == 0 or not gates(job):
            chunks += ceil_div(ceil_div(job[at + ROWS], job[WAYS]), ceil_div(job[HEIGHT], job[WAYS]))
    return chunks
