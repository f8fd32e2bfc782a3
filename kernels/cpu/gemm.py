"""Matrix products in registers: a tile of 6 rows and 16 columns is summed while nothing but its inputs is loaded.

One side is packed: 16 vectors next to each other, element by element, so that a load brings one element of each. The
other side is read as it lies, one element at a time, spread over all lanes.

Products are summed from zero and then added to what is there: whoever cuts a long sum into stretches gets a smaller
error than one sum over all would have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, get, load, load_splat, mul, put, splat, store, store_columns, zeros

ROWS = 6
# Steps of the inner loop without a jump or an address: whoever shares a core's decoder leaves no room for them.
UNROLLED = 4


@jit
def _step_6(a: Any, at: int, row: int, b: Any, b_at: int, sums: Any) -> Any:
    """One vector of b times an element of each of 6 rows, added to the rows' sums."""
    c0, c1, c2, c3, c4, c5 = sums
    v = load(b, b_at)
    return (
        fma(load_splat(a, at), v, c0),
        fma(load_splat(a, at + row), v, c1),
        fma(load_splat(a, at + 2 * row), v, c2),
        fma(load_splat(a, at + 3 * row), v, c3),
        fma(load_splat(a, at + 4 * row), v, c4),
        fma(load_splat(a, at + 5 * row), v, c5),
    )


@jit
def tiles_6(a: Any, at: int, row: int, step: int, n_rows: int, b: Any, b_at: int, c: Any, c_at: int, n: int) -> None:
    """`c[c_at + 16 r + lane] += sum over i < n of a[at + r row + i step] b[b_at + 16 i + lane]`, 6 rows r at a time.

    What is left of `n_rows` is left to others.
    """
    whole = n - n % UNROLLED
    for r in range(0, n_rows - ROWS + 1, ROWS):
        first = at + r * row
        sums = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
        for i in range(0, whole, UNROLLED):
            for j in range(UNROLLED):
                sums = _step_6(a, first + (i + j) * step, row, b, b_at + LANES * (i + j), sums)
        for i in range(whole, n):
            sums = _step_6(a, first + i * step, row, b, b_at + LANES * i, sums)
        to = c_at + LANES * r
        store(c, to, add(load(c, to), sums[0]))
        store(c, to + 16, add(load(c, to + 16), sums[1]))
        store(c, to + 32, add(load(c, to + 32), sums[2]))
        store(c, to + 48, add(load(c, to + 48), sums[3]))
        store(c, to + 64, add(load(c, to + 64), sums[4]))
        store(c, to + 80, add(load(c, to + 80), sums[5]))


@jit
def tile_2(a: Any, at: int, row: int, step: int, b: Any, b_at: int, c: Any, c_at: int, n: int) -> None:
    """The same for 2 rows: what is left of a matrix whose rows are no multiple of 6."""
    c0, c1 = zeros(), zeros()
    for i in range(n):
        v, p = load(b, b_at + LANES * i), at + i * step
        c0 = fma(load_splat(a, p), v, c0)
        c1 = fma(load_splat(a, p + row), v, c1)
    store(c, c_at, add(load(c, c_at), c0))
    store(c, c_at + 16, add(load(c, c_at + 16), c1))


@jit
def tile_1(a: Any, at: int, row: int, step: int, b: Any, b_at: int, c: Any, c_at: int, n: int) -> None:
    """The same for one row."""
    c0 = zeros()
    for i in range(n):
        c0 = fma(load_splat(a, at + i * step), load(b, b_at + LANES * i), c0)
    store(c, c_at, add(load(c, c_at), c0))


@jit
def multiply_add(
    a: Any, at: int, row: int, step: int, n_rows: int, b: Any, b_at: int, c: Any, c_at: int, n: int
) -> None:
    """`c += a b` for `n_rows` rows of a, `row` elements apart, and one panel of 16 packed columns of `n` elements."""
    tiles_6(a, at, row, step, n_rows, b, b_at, c, c_at, n)
    r = n_rows - n_rows % ROWS
    while r + 2 <= n_rows:
        tile_2(a, at + r * row, row, step, b, b_at, c, c_at + LANES * r, n)
        r += 2
    if r < n_rows:
        tile_1(a, at + r * row, row, step, b, b_at, c, c_at + LANES * r, n)


@jit
def _row(x: Any, at: int, exists: bool, factor: Any) -> Any:
    """16 elements of a row, or zeros where there is no such row."""
    return mul(factor, load(x, at)) if exists else zeros()


@jit
def pack(x: Any, at: int, row: int, n_rows: int, n: int, factor: Any, out: Any, to: int) -> None:
    """`out[to + 16 i + lane] = factor * x[at + lane * row + i]`; lanes from `n_rows` on are 0."""
    whole, spread = n - n % LANES, splat(factor)
    for i in range(0, whole, LANES):
        for lane in range(0, LANES, 4):
            first = at + lane * row + i
            store_columns(
                out, to + LANES * i + lane, LANES,
                _row(x, first, lane < n_rows, spread),
                _row(x, first + row, lane + 1 < n_rows, spread),
                _row(x, first + 2 * row, lane + 2 < n_rows, spread),
                _row(x, first + 3 * row, lane + 3 < n_rows, spread),
            )  # fmt: skip
    for i in range(whole, n):
        for lane in range(LANES):
            put(out, to + LANES * i + lane, factor * get(x, at + lane * row + i) if lane < n_rows else np.float32(0))
