"""What every format is made into: products of one vector with four rows as they are stored, and expanded rows.

A format says what its weights are, in vectors; here they are multiplied in registers, or written to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.cpu.jit import jit
from kernels.cpu.layout import LINE_BYTES, STRETCH
from kernels.cpu.memory import floats, hidden, raw
from kernels.cpu.vectors import fma, load, prefetch, store, total, zeros

# Bytes ahead of a row's multiplications at which memory is asked for; a processor follows four rows well by itself.
_AHEAD = 1024

_ZERO = np.float32(0)


def four_rows(block: int, block_bytes: int, add_block: Callable[..., Any]) -> Any:
    """Make the kernel of a format.

    Args:
        block: weights of a block.
        block_bytes: bytes of a block.
        add_block: adds the products of a block with 16 columns after the other to 16 sums.
    """

    @jit
    def multiply(a: int, b: int, c: int, d: int, n_columns: int, x: Any, y: Any, at: int, apart: int) -> None:
        """`y[at + i * apart] = row i . x` in the order of `tile.py`, for the rows at four addresses.

        The rows lie in different places of memory and take turns block by block: a processor reads several places at
        once faster than one.
        """
        i, total_a, total_b, total_c, total_d = 0, _ZERO, _ZERO, _ZERO, _ZERO
        for first in range(0, n_columns, STRETCH):
            sum_a, sum_b, sum_c, sum_d = zeros(), zeros(), zeros(), zeros()
            for column in range(first, min(first + STRETCH, n_columns), block):
                prefetch(raw(a), i + _AHEAD)
                prefetch(raw(b), i + _AHEAD)
                prefetch(raw(c), i + _AHEAD)
                prefetch(raw(d), i + _AHEAD)
                sum_a, sum_b = add_block(raw(a), i, x, column, sum_a), add_block(raw(b), i, x, column, sum_b)
                sum_c, sum_d = add_block(raw(c), i, x, column, sum_c), add_block(raw(d), i, x, column, sum_d)
                i += block_bytes
            total_a, total_b = total_a + total(sum_a), total_b + total(sum_b)
            total_c, total_d = total_c + total(sum_c), total_d + total(sum_d)
        y[at], y[at + apart], y[at + 2 * apart], y[at + 3 * apart] = total_a, total_b, total_c, total_d

    return multiply


def add_32(weights: Callable[..., Any]) -> Any:
    """Make the `add_block` of a format whose blocks have 32 weights, which `weights` returns in two vectors."""

    @jit
    def add_block(blocks: Any, at: int, x: Any, column: int, sums: Any) -> Any:
        """Add the products of the block at byte `at` with x from `column` on to 16 sums."""
        low, high = weights(blocks, at)
        return fma(high, load(x, column + 16), fma(low, load(x, column), sums))

    return add_block


def dequantize_32(block_bytes: int, weights: Callable[..., Any]) -> Any:
    """Make the kernel that expands blocks of 32 weights."""

    @jit
    def dequantize(blocks: Any, first: int, last: int, out: Any, to: int) -> None:
        """Write the float32 weights of blocks first to last - 1 to `out[to ...]`."""
        for block in range(first, last):
            low, high = weights(blocks, block * block_bytes)
            store(out, to, low)
            store(out, to + 16, high)
            to += 32

    return dequantize


def four_rows_by_parts(block_bytes: int, scales_of: Callable[..., Any], part: Callable[..., Any]) -> Any:
    """Make the kernel of a format whose blocks have 256 weights.

    Sums of one row wait for each other: so rows take turns four times in a block.

    Args:
        block_bytes: bytes of a block.
        scales_of: returns 16 scales of the block at a byte.
        part: returns 64 weights of a block in four vectors, given which ones, and where the block's scales lie.
    """

    @jit
    def multiply(
        a: int, b: int, c: int, d: int, n_columns: int, x: Any, y: Any, at: int, apart: int, room: int
    ) -> None:
        """What the kernels made by `four_rows` do.

        At address `room` is room for the scales of four rows of a stretch: a scale that is loaded is in all lanes at
        once, which takes two instructions where it comes from a register.
        """
        stored, scales = floats(room), floats(hidden(room))
        i, total_a, total_b, total_c, total_d = 0, _ZERO, _ZERO, _ZERO, _ZERO
        for first in range(0, n_columns, STRETCH):
            sum_a, sum_b, sum_c, sum_d = zeros(), zeros(), zeros(), zeros()
            blocks = min(STRETCH, n_columns - first) // 256
            for block in range(blocks):
                store(stored, 64 * block, scales_of(raw(a), i + block * block_bytes))
                store(stored, 64 * block + 16, scales_of(raw(b), i + block * block_bytes))
                store(stored, 64 * block + 32, scales_of(raw(c), i + block * block_bytes))
                store(stored, 64 * block + 48, scales_of(raw(d), i + block * block_bytes))
            # LLVM does not know how many parts there are: it would take all of them at once, and run out of registers.
            for p in range(4 * blocks):
                column, at_block, s, q = first + 64 * p, i + p // 4 * block_bytes, p // 4 * 64, p % 4
                prefetch(raw(a), at_block + q * LINE_BYTES + _AHEAD)
                prefetch(raw(b), at_block + q * LINE_BYTES + _AHEAD)
                prefetch(raw(c), at_block + q * LINE_BYTES + _AHEAD)
                prefetch(raw(d), at_block + q * LINE_BYTES + _AHEAD)
                sum_a = _add_four(part(raw(a), at_block, q, scales, s), x, column, sum_a)
                sum_b = _add_four(part(raw(b), at_block, q, scales, s + 16), x, column, sum_b)
                sum_c = _add_four(part(raw(c), at_block, q, scales, s + 32), x, column, sum_c)
                sum_d = _add_four(part(raw(d), at_block, q, scales, s + 48), x, column, sum_d)
            i += blocks * block_bytes
            total_a, total_b = total_a + total(sum_a), total_b + total(sum_b)
            total_c, total_d = total_c + total(sum_c), total_d + total(sum_d)
        y[at], y[at + apart], y[at + 2 * apart], y[at + 3 * apart] = total_a, total_b, total_c, total_d

    return multiply


@jit
def _add_four(weights: Any, x: Any, column: int, sums: Any) -> Any:
    """Add the products of 64 weights with x from `column` on to 16 sums."""
    a, b, c, d = weights
    sums = fma(b, load(x, column + 16), fma(a, load(x, column), sums))
    return fma(d, load(x, column + 48), fma(c, load(x, column + 32), sums))


def dequantize_by_parts(block_bytes: int, scales_of: Callable[..., Any], part: Callable[..., Any]) -> Any:
    """Make the kernel that expands blocks of 256 weights; arguments are those of `four_rows_by_parts`."""

    @jit
    def dequantize(blocks: Any, first: int, last: int, out: Any, to: int, room: int) -> None:
        """Write the float32 weights of blocks first to last - 1 to `out[to ...]`; at `room` is room for 16 scales."""
        stored, scales = floats(room), floats(hidden(room))
        for block in range(first, last):
            at = block * block_bytes
            store(stored, 0, scales_of(blocks, at))
            for p in range(min(4, 4 * (last - block))):
                a, b, c, d = part(blocks, at, p, scales, 0)
                store(out, to, a)
                store(out, to + 16, b)
                store(out, to + 32, c)
                store(out, to + 48, d)
                to += 64

    return dequantize
