"""Storage formats: the kernels that each format exports, and how other kernels call them.

The file of a format has functions that load its blocks as SIMD vectors of weights or quants. From these functions,
`rows.py` makes the kernels `four_rows` (gemv) and `dequantize`. For products in fixed point, `panels.py` makes `panel`
(gemm: expands rows), and `fixed_rows.py` makes `eight_rows` (gemv). A format is compiled separately, when a model first
needs it (`build/library.py`). Other kernels call the format's kernels through function pointers in the matrix's
descriptor, so a new format changes no other kernel. `blocks_numpy.py` has the NumPy references of all formats.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..build.jit import export, jit
from ..build.layout import (
    BLOCK_BYTES,
    BLOCK_WEIGHTS,
    EXPAND,
    FORMAT,
    FOUR_ROWS,
    LINE_BYTES,
    MOST_STORED,
    PANEL_MOST,
    PANEL_TOKENS,
    STRETCH,
    WEIGHTS,
)
from ..build.library import PACKAGE, affine_format
from ..build.memory import floats, invoke, raw, words
from ..build.vectors import prefetch
from .sums import PANEL_SIZES, WIDE

# Bytes of scratch memory that `four_rows`, `expand`, `panel` and `eight_rows` get for scales.
FORMAT_SCRATCH = 4 * STRETCH

# The constant MOST of a format is the most input vectors for which gemv is used; for more vectors, gemm is faster
# (measured). Gemv packs its vectors into panels of at most 9 vectors, and dequantises weights once per panel; gemm
# dequantises them once. So MOST is usually one full panel. With AVX-512, two panels are faster than gemm if
# dequantising is cheap (MLX's groups of 8-bit quants) or not needed (float32), but not for Q8_0: for 10 to 18 vectors,
# gemm takes 4 to 10 % less time (Xeon).
TWO_PANELS = min(PANEL_TOKENS, 2 * PANEL_SIZES[-1] if WIDE else PANEL_SIZES[-1])
ONE_PANEL = PANEL_SIZES[-1]


def kernels_of(name: str) -> Any:
    """Return the module of a format, or for one of MLX's affine formats an object with the same attributes."""
    is_affine = affine_format(name) is not None
    module: Any = importlib.import_module(f"{PACKAGE}.formats.{'affine' if is_affine else name}")
    return module.kernels(name) if is_affine else module


def export_format(name: str) -> list[str]:
    """Export a format's kernels for float32 products; return the exported names.

    A format defines BLOCK (number of weights of a block), BLOCK_BYTES, MOST, and the kernels `four_rows` and
    `dequantize`, which is exported as `expand`. A third exported function, `sizes`, writes the three numbers. All
    formats but float32 also define `panel` and `eight_rows` (`export_panel`).
    """
    found = kernels_of(name)
    rows_of, blocks_of = found.four_rows, found.dequantize
    block, block_bytes, most = found.BLOCK, found.BLOCK_BYTES, found.MOST

    def four_rows(
        n_vectors: int, a: int, b: int, c: int, d: int, last_a: int, last_b: int, last_c: int, last_d: int, step: int,
        count: int, n_columns: int, panel: int, first: int, y: int, at: int, apart: int, y_row: int, ahead: int,
        scratch: int,
    ) -> None:  # fmt: skip
        rows_of(
            n_vectors, (a, b, c, d), (last_a, last_b, last_c, last_d), step, count, n_columns, floats(panel), first,
            floats(y), at, apart, y_row, ahead, scratch,
        )  # fmt: skip

    def expand(weights: int, first: int, last: int, out: int, at: int, step: int, apart: int, scratch: int) -> None:
        blocks_of(raw(weights), first, last, floats(out), at, step, apart, scratch)

    def sizes(out: int) -> None:
        found = words(out)
        found[0], found[1], found[2] = block, block_bytes, most

    return [export(f"{name}_{function.__name__}", function) for function in (four_rows, expand, sizes)]


def export_panel(name: str) -> list[str]:
    """Export a format's `panel` and `eight_rows`, for products in fixed point; return the exported names.

    A third exported function, `panel_kind`, writes two words: the kind of the format (`panels.py`), and the most tokens
    for which `eight_rows` is used.
    """
    found = kernels_of(name)
    (expand_rows, kind), (rows_of, most) = found.panel, found.eight_rows

    def panel(weights: int, step: int, n_rows: int, n_columns: int, out: int, scratch: int) -> None:
        expand_rows(weights, step, n_rows, n_columns, out, scratch)

    def panel_kind(out: int) -> None:
        found = words(out)
        found[0], found[1] = kind, most

    def eight_rows(
        n_tokens: int, a: int, b: int, c: int, d: int, last_a: int, last_b: int, last_c: int, last_d: int, step: int,
        count: int, n_columns: int, records: int, y: int, apart: int, y_row: int, ahead: int, scratch: int,
    ) -> None:  # fmt: skip
        rows_of(
            n_tokens, (a, b, c, d), (last_a, last_b, last_c, last_d), step, count, n_columns, records, y, apart, y_row,
            ahead, scratch,
        )  # fmt: skip

    return [export(f"{name}_{function.__name__}", function) for function in (panel, panel_kind, eight_rows)]


@jit
def row_bytes(job: Any, m: int, n_columns: int) -> Any:
    """Return the bytes of `n_columns` weights of a row of matrix m; `n_columns` is a multiple of the block size.

    The words of matrix m begin at `job[m]` (`layout.py`).
    """
    return n_columns // job[m + FORMAT + BLOCK_WEIGHTS] * job[m + FORMAT + BLOCK_BYTES]


@jit
def most_stored(job: Any, m: int) -> Any:
    """Return the most input vectors that gemv multiplies with the rows of matrix m as they are stored."""
    return job[m + FORMAT + MOST_STORED]


@jit
def most_fixed(job: Any, m: int) -> Any:
    """Return the most tokens that are multiplied in fixed point with the rows of matrix m as they are stored."""
    return job[m + PANEL_MOST]


@jit
def four_rows(
    job: Any, m: int, n_vectors: int, rows: Any, last: Any, step: int, count: int, n_columns: int, panel: int,
    first: int, y: int, at: int, apart: int, y_row: int, ahead: int, scratch: int,
) -> None:  # fmt: skip
    """Add `dot(row r of range i, input vector t)` to `y[at + i * apart + r + t * y_row]`, for four ranges of rows.

    All rows have the format of matrix m; if m is a gate matrix, two of the ranges belong to the up matrix. `panel` and
    `y` are addresses of arrays; `_for_panels` in `rows.py` describes the other arguments.
    """
    invoke(
        job[m + FORMAT + FOUR_ROWS],
        (
            n_vectors, rows[0], rows[1], rows[2], rows[3], last[0], last[1], last[2], last[3], step, count, n_columns,
            panel, first, y, at, apart, y_row, ahead, scratch,
        ),
    )  # fmt: skip


@jit
def expand(
    job: Any,
    m: int,
    n_columns: int,
    row: int,
    column: int,
    n: int,
    out: int,
    at: int,
    step: int,
    apart: int,
    scratch: int,
) -> None:
    """Write `n` weights of a row of matrix m, from `column` on, to `out[at:]` as float32.

    In `out`, groups of 16 weights begin `step` elements apart. A group is stored in runs of `PART` weights
    (`vectors.py`), which begin `apart` elements apart. With `step = 16` and `apart = PART`, weights keep their order.
    With `step = PART` and `apart = n / 16 * PART`, `out` is an array (16 / PART, n / 16, PART), as `tile.py` reads it.

    `column` and `n` are multiples of the block size. For float32, `n` may be any number, and zeros fill the last
    group of 16. `out` is an address, and `scratch` the address of `FORMAT_SCRATCH` bytes of scratch memory.
    """
    start, block = row * n_columns + column, job[m + FORMAT + BLOCK_WEIGHTS]
    invoke(
        job[m + FORMAT + EXPAND],
        (job[m + WEIGHTS], start // block, (start + n) // block, out, at, step, apart, scratch),
    )


@jit
def prefetch_weights(job: Any, m: int, n_columns: int, row: int, column: int, n: int) -> None:
    """Prefetch the bytes that `expand` reads for the same arguments. `row` may be beyond the end of the matrix."""
    first, data = row_bytes(job, m, row * n_columns + column), raw(job[m + WEIGHTS])
    for at in range(first, first + row_bytes(job, m, n), LINE_BYTES):
        prefetch(data, at)
