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
