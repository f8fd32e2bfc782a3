"""Jobs of linear layers: the words of a job, and the mapping of chunks to matrices and rows."""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.layout import ACTIVATION, CHUNK, MATRICES, OWN, ROWS, TABLE, WIDTH

# Words of a job: the block's words, then X, the address of the input, STRIDE, the distance of its rows in elements, T,
# their number, Y and RESIDUAL, the addresses of the output and of the residual, HEIGHT, rows of a matrix per chunk, and
# WAYS, the number of ranges of a matrix from which a chunk takes its rows. There are PIECES chunks for each SPAN of
# input rows.
X, STRIDE, T, Y, RESIDUAL, HEIGHT, WAYS, PIECES, SPAN = range(OWN, OWN + 9)


@jit
def gates(job: Any) -> Any:
    """Return whether the first of two matrices is a gate for the second."""
    return job[ACTIVATION] != 0 and job[MATRICES] == 2


@jit
def matrix_of(job: Any, chunk: int) -> int:
    """Return the first word of the chunk's matrix; a chunk of a gate also covers the same rows of the up matrix."""
    at = TABLE
    for m in range(1, 1 if gates(job) else job[MATRICES]):
        if job[TABLE + m * WIDTH + CHUNK] <= chunk:
            at = TABLE + m * WIDTH
    return at


@jit
def ceil_div(n: int, by: int) -> int:
    """Return `n / by`, rounded up."""
    return (n + by - 1) // by


@jit
def number_chunks(job: Any) -> int:
    """Write the first chunk of each matrix; return the number of chunks. A gate and its up matrix share chunks."""
    chunks = 0
    for m in range(job[MATRICES]):
        at = TABLE + m * WIDTH
        job[at + CHUNK] = chunks
        if m == 0 or not gates(job):
            chunks += ceil_div(ceil_div(job[at + ROWS], job[WAYS]), ceil_div(job[HEIGHT], job[WAYS]))
    return chunks
