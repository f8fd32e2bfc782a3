"""CPU kernels of float32 matrices. The NumPy reference of `four_rows` is `dot` in `products/order_numpy.py`."""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.layout import LANES
from ..build.memory import floats
from ..build.vectors import PART, add, fma, get, load, load_floats, put, store_parts, total, zeros
from .format import TWO_PANELS
from .rows import four_rows as make_four_rows

BLOCK, BLOCK_BYTES, MOST = 1, 4, TWO_PANELS


@jit
def weights(rows: Any, at: int) -> Any:
    """Return the 16 weights at byte `at`, as a tuple of one vector."""
    return (load_floats(rows, at),)


# BLOCK is 1, so that `expand` accepts any number of weights. Gemv multiplies 16 weights at a time, like a block.
four_rows = make_four_rows(LANES, 4 * LANES, weights)


@jit
def copy(weights: Any, at: int, n: int, out: Any, to: int, step: int, apart: int) -> None:
    """Copy `weights[at : at + n]` to `out[to:]`, arranged as by `expand` (`format.py`); zeros fill the last 16."""
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        store_parts(out, to, apart, load(weights, at + i))
        to += step
    if whole < n:
        store_parts(out, to, apart, zeros())
        for i in range(n - whole):
            put(out, to + i // PART * apart + i % PART, get(weights, at + whole + i))


@jit
def dequantize(blocks: Any, first: int, last: int, out: Any, to: int, step: int, apart: int, scratch: int) -> None:
    """Copy weights `first` to `last - 1` to `out[to:]`, arranged as in `expand` (`format.py`)."""
    copy(floats(blocks.ctypes.data), first, last - first, out, to, step, apart)


@jit
def dot(a: Any, a_first: int, b: Any, b_first: int, n: int) -> Any:
    """Return the dot product of `n` elements of a and b.

    Of the first `n // 32 * 32` products, product i is added to sum `i % 32`. The remaining products are added, one
    by one, to the total of the 32 sums.
    """
    even, odd = zeros(), zeros()
    whole = n // (2 * LANES) * (2 * LANES)
    for i in range(0, whole, 2 * LANES):
        even = fma(load(a, a_first + i), load(b, b_first + i), even)
        odd = fma(load(a, a_first + i + LANES), load(b, b_first + i + LANES), odd)
    sum_ = total(add(even, odd))
    for i in range(whole, n):
        sum_ += get(a, a_first + i) * get(b, b_first + i)
    return sum_
