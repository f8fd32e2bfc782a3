"""Jobs of linear layers: the words (int64) of a job, the rows of a chunk, and bias, activation and residual."""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.layout import ACTIVATION, BIAS, CHUNK, COLUMN, LANES, MATRICES, OWN, ROWS, TABLE, WIDTH, N
from ..build.memory import floats
from ..build.vectors import get, load, put, store
from .activations import activate, gated

# Words of a job, after the words of the block (linear layers that share one input):
#   X, STRIDE, T       the address of the input, the distance between its rows in elements, and the number of its rows
#   Y, RESIDUAL        the addresses of the output and of the residual
#   HEIGHT, WAYS       a chunk has HEIGHT rows of a matrix, from WAYS ranges of the matrix
#   PIECES, SPAN       in gemm, input rows are cut into spans of SPAN rows (in fixed point, of SPAN groups of rows);
#                      each span has PIECES chunks
X, STRIDE, T, Y, RESIDUAL, HEIGHT, WAYS, PIECES, SPAN = range(OWN, OWN + 9)


@jit
def gates(job: Any) -> Any:
    """Return whether the job's matrices are a gate matrix and an up matrix, whose products are combined."""
    return job[ACTIVATION] != 0 and job[MATRICES] == 2


@jit
def matrix_of(job: Any, chunk: int) -> int:
    """Return the index in the job of the first word of the chunk's matrix; other functions call this index m.

    With a gate, the chunk also has the same rows of the up matrix.
    """
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
    """Write the index of each matrix's first chunk to the matrix's word CHUNK; return the number of chunks of the job.

    A gate matrix and its up matrix share their chunks.
    """
    chunks = 0
    for m in range(job[MATRICES]):
        at = TABLE + m * WIDTH
        job[at + CHUNK] = chunks
        if m == 0 or not gates(job):
            chunks += ceil_div(ceil_div(job[at + ROWS], job[WAYS]), ceil_div(job[HEIGHT], job[WAYS]))
    return chunks


# ---- the end of a product: bias, activation, residual ----


@jit
def add_bias(job: Any, m: int, first: int, n: int, products: Any, at: int) -> None:
    """Add the bias of n rows of matrix m, from row `first` on, to the products from `products[at]` on."""
    if job[m + BIAS] != 0:
        bias = floats(job[m + BIAS] + 4 * first)
        for r in range(n):
            put(products, at + r, get(products, at + r) + get(bias, r))


@jit
def gate_row(job: Any, m: int, first: int, n: int, products: Any, at: int, apart: int) -> None:
    """Replace n products of the gate, matrix m, by `activation(gate) * up`.

    The products of the up matrix are `apart` elements after those of the gate. Both begin at row `first` of their
    matrix, do not yet include the biases, and are padded to whole vectors.
    """
    add_bias(job, m, first, n, products, at)
    add_bias(job, m + WIDTH, first, n, products, at + apart)
    for r in range(at, at + n, LANES):
        store(products, r, gated(job[ACTIVATION], load(products, r), load(products, r + apart)))


@jit
def put_ranges(job: Any, m: int, first: int, n: int, apart: int, products: Any, size: int) -> None:
    """Call `put_row` for every input row and n rows of each range of the matrix, from the range's row `first` on.

    `products` are (T, 4 ranges, size), and size is at least n. Range `way` begins at row `way * apart` of the matrix.
    With a gate, the first two ranges are of the gate matrix, and the last two are the same ranges of the up matrix.
    """
    for t in range(job[T]):
        for way in range(job[WAYS]):
            at, row = (4 * t + way) * size, way * apart + first
            n_rows = min(n, job[m + ROWS] - row)
            if gates(job):
                gate_row(job, m, row, n_rows, products, at, 2 * size)
            put_row(job, m, t, row, n_rows, products, at)


@jit
def put_row(job: Any, m: int, t: int, first: int, n: int, products: Any, at: int) -> None:
    """Write `activation(product + bias) + residual` of input row t and n rows of matrix m, from row `first` on.

    The products begin at `products[at]`, are padded to whole vectors, and are changed in place. With a gate, they must
    already be results of `gate_row`.
    """
    place = 4 * (t * job[N] + job[m + COLUMN] + first)
    y = floats(job[Y] + place)
    if not gates(job):
        add_bias(job, m, first, n, products, at)
        if job[ACTIVATION] != 0:
            for r in range(at, at + n, LANES):
                store(products, r, activate(job[ACTIVATION], load(products, r)))
    if job[RESIDUAL] != 0:
        residual = floats(job[RESIDUAL] + place)
        for r in range(n):
            put(y, r, get(products, at + r) + get(residual, r))
    else:
        for r in range(n):
            put(y, r, get(products, at + r))
