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
from kernels.cpu.vectors import add, fma, get, load, load_splat, put, store, zeros

ROWS = 6
# Elements that are packed at a time.
STRETCH = 64


@jit
def tile_6(a: Any, at: int, row: int, step: int, b: Any, b_at: int, c: Any, c_at: int, n: int) -> None:
    """`c[c_at + 16 r + lane] += sum over i < n of a[at + r row + i step] b[b_at + 16 i + lane]` for 6 rows r."""
    c0, c1, c2, c3, c4, c5 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    for i in range(n):
        v, p = load(b, b_at + LANES * i), at + i * step
        c0 = fma(load_splat(a, p), v, c0)
        c1 = fma(load_splat(a, p + row), v, c1)
        c2 = fma(load_splat(a, p + 2 * row), v, c2)
        c3 = fma(load_splat(a, p + 3 * row), v, c3)
        c4 = fma(load_splat(a, p + 4 * row), v, c4)
        c5 = fma(load_splat(a, p + 5 * row), v, c5)
    store(c, c_at, add(load(c, c_at), c0))
    store(c, c_at + 16, add(load(c, c_at + 16), c1))
    store(c, c_at + 32, add(load(c, c_at + 32), c2))
    store(c, c_at + 48, add(load(c, c_at + 48), c3))
    store(c, c_at + 64, add(load(c, c_at + 64), c4))
    store(c, c_at + 80, add(load(c, c_at + 80), c5))


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
    r = 0
    while r + ROWS <= n_rows:
        tile_6(a, at + r * row, row, step, b, b_at, c, c_at + LANES * r, n)
        r += ROWS
    while r + 2 <= n_rows:
        tile_2(a, at + r * row, row, step, b, b_at, c, c_at + LANES * r, n)
        r += 2
    if r < n_rows:
        tile_1(a, at + r * row, row, step, b, b_at, c, c_at + LANES * r, n)


@jit
def pack(x: Any, at: int, row: int, n_rows: int, n: int, factor: Any, out: Any, to: int) -> None:
    """`out[to + 16 i + lane] = factor * x[at + lane * row + i]`; lanes from `n_rows` on are 0.

    A stretch of elements at a time, so that what is written stays in the first-level cache until all lanes have been.
    """
    zero = np.float32(0)
    for first in range(0, n, STRETCH):
        last = min(first + STRETCH, n)
        for lane in range(n_rows):
            for i in range(first, last):
                put(out, to + LANES * i + lane, factor * get(x, at + lane * row + i))
        for lane in range(n_rows, LANES):
            for i in range(first, last):
                put(out, to + LANES * i + lane, zero)
