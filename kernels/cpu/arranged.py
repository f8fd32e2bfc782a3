"""A vector put in the order in which the codes of 4 and 6 bits are cut out of their words.

A stretch of 128 weights is 16 words of codes, or twice 16. Lane by lane, and code by code of a word, lie the elements of x that these
are multiplied with: first those of the codes that have the lower place in their byte, then the others, 64 each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.codes import cut, store_every_4th
from kernels.cpu.jit import jit
from kernels.cpu.layout import LANES
from kernels.cpu.vectors import add, fma, load, mul, splat, store, total, zeros

# Weights of a stretch.
STRETCH = 128


@jit
def _quarter(x: Any, at: int, n: int) -> Any:
    """16 elements, or zeros behind the end."""
    return load(x, at) if at < n else zeros()


@jit
def arrange(x: Any, at: int, n: int, span: int, out: Any, to: int) -> None:
    """`out[to + 64 h + 16 j + lane]` = the element of x that meets byte j of word `lane`, in its half h.

    Args:
        x: the vector.
        at: where the stretch begins in it.
        n: elements of x; behind them are zeros.
        span: weights whose codes have the same half of neighbouring bytes: 16, 32 or 64.
        out: takes 128 elements.
        to: where.
    """
    for half in range(2):
        first = at + half * span
        # Four words hold 16 elements in a row, and spans are two apart.
        b, c, d = 16 + span * (16 // span), 32 + span * (32 // span), 48 + span * (48 // span)
        store_every_4th(
            out, to + 4 * LANES * half,
            _quarter(x, first, n), _quarter(x, first + b, n), _quarter(x, first + c, n), _quarter(x, first + d, n),
        )  # fmt: skip


@jit
def divide(x: Any, at: int) -> None:
    """Divide 64 arranged elements by what their codes are too large by: 1, 2**8, 2**16, 2**24, 16 elements each."""
    for j in range(1, 4):
        factor = splat(np.float32(1.0) / np.float32(1 << 8 * j))
        store(x, at + LANES * j, mul(load(x, at + LANES * j), factor))


@jit
def dot_of_4(words: Any, mask: int, x: Any, at: int) -> Any:
    """The codes that lie in the lowest bits of each byte, under `mask`, times 64 arranged elements, lane by lane."""
    sums = mul(cut(words, mask), load(x, at))
    return _three(words, mask, x, at, sums)


@jit
def dot_of_4_from(words: Any, mask: int, x: Any, at: int, start: Any) -> Any:
    """The same, added to `start`."""
    sums = fma(cut(words, mask), load(x, at), start)
    return _three(words, mask, x, at, sums)


@jit
def _three(words: Any, mask: int, x: Any, at: int, sums: Any) -> Any:
    sums = fma(cut(words, mask << 8), load(x, at + 16), sums)
    sums = fma(cut(words, mask << 16), load(x, at + 32), sums)
    return fma(cut(words, mask << 24), load(x, at + 48), sums)


@jit
def sum_of_4(x: Any, at: int) -> Any:
    """Lane by lane, what 64 arranged elements add up to."""
    first, second = add(load(x, at), load(x, at + 16)), add(load(x, at + 32), load(x, at + 48))
    return add(first, second)


@jit
def sum_of_32(x: Any, at: int) -> Any:
    """The sum of 32 elements."""
    return total(add(load(x, at), load(x, at + LANES)))
