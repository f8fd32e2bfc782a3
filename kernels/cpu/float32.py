"""float32 matrices on the CPU, as they lie in a file. The NumPy twin is in `float32_numpy.py`."""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, get, load, total, zeros


@jit
def dot(a: Any, a_first: int, b: Any, b_first: int, n: int) -> Any:
    """The product of `n` elements of a and b, from `a_first` and `b_first` on, summed in 32 lanes."""
    even, odd = zeros(), zeros()
    whole = n // (2 * LANES) * (2 * LANES)
    for i in range(0, whole, 2 * LANES):
        even = fma(load(a, a_first + i), load(b, b_first + i), even)
        odd = fma(load(a, a_first + i + LANES), load(b, b_first + i + LANES), odd)
    sum_ = total(add(even, odd))
    for i in range(whole, n):
        sum_ += get(a, a_first + i) * get(b, b_first + i)
    return sum_


@jit
def matvec(weights: Any, n_columns: int, x: Any, y: Any, first: int, last: int) -> None:
    """`y[r] = row r . x` for rows first to last - 1 of a row-major matrix of `n_columns`."""
    for r in range(first, last):
        y[r] = dot(weights, r * n_columns, x, 0, n_columns)


@jit
def four_rows(a: Any, b: Any, c: Any, d: Any, n_columns: int, x: Any, y: Any, at: int, apart: int) -> None:
    """`y[at + i * apart] = row . x` for four rows, which lie apart: memory is read at four places at once."""
    sum_a, sum_b, sum_c, sum_d = zeros(), zeros(), zeros(), zeros()
    whole = n_columns // LANES * LANES
    for i in range(0, whole, LANES):
        part = load(x, i)
        sum_a, sum_b = fma(load(a, i), part, sum_a), fma(load(b, i), part, sum_b)
        sum_c, sum_d = fma(load(c, i), part, sum_c), fma(load(d, i), part, sum_d)
    of_a, of_b, of_c, of_d = total(sum_a), total(sum_b), total(sum_c), total(sum_d)
    for i in range(whole, n_columns):
        part = get(x, i)
        of_a, of_b, of_c, of_d = (
            of_a + get(a, i) * part, of_b + get(b, i) * part, of_c + get(c, i) * part, of_d + get(d, i) * part,
        )  # fmt: skip
    y[at], y[at + apart], y[at + 2 * apart], y[at + 3 * apart] = of_a, of_b, of_c, of_d
