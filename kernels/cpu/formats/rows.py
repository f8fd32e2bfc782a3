"""Make the float32 kernels of a block format: gemv with rows as they are stored, and expansion of rows to float32.

A format provides a function that returns the weights of a block in SIMD vectors. The kernel `four_rows` multiplies
these weights, in registers, with a panel of packed input vectors; `dequantize` writes them to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..build.jit import jit
from ..build.layout import LANES, LINE_BYTES, STRETCH
from ..build.memory import floats, hidden, raw
from ..build.vectors import prefetch, store, store_parts
from .sums import PANEL_SIZES, add_products, add_totals, no_sums, rows_together


def four_rows(block: int, block_bytes: int, weights: Callable[..., Any]) -> Any:
    """Make the gemv kernel of a format with blocks of 16 or 32 weights. The kernel unpacks a whole block at a time.

    A block has `block` weights. `weights(blocks, at)` returns the weights of the block at byte `at`, as a tuple of
    vectors.
    """

    def make(n_vectors: int) -> Any:
        n_rows = rows_together(n_vectors)

        def weights_of(address: int, at: int, p: int, scales: int) -> Any:
            return weights(raw(address), at)

        zeros, add = no_sums(n_rows * n_vectors), add_products(n_rows, n_vectors, block // LANES, weights_of)
        add_to = add_totals(n_rows, n_vectors)

        @jit
        def multiply(
            rows: Any, n_columns: int, panel: Any, first: int, y: Any, at: int, apart: int, y_row: int, ahead: int,
            scratch: int,
        ) -> None:  # fmt: skip
            i = 0
            for stretch in range(0, n_columns, STRETCH):
                sums = zeros()
                for column in range(stretch, min(stretch + STRETCH, n_columns), block):
                    for r in range(n_rows):
                        prefetch(raw(rows[r]), i + ahead)
                    sums = add(rows, i, 0, 0, panel, first + column * n_vectors, sums)
                    i += block_bytes
                add_to(y, at, apart, y_row, sums)

        return multiply

    return _for_panels(make)


def _store_scales(scales_of: Callable[..., Any], scale_vectors: int) -> Any:
    """Make the function that writes the scales of a block to `stored[at:]`; see `four_rows_by_parts`."""

    @jit
    def put(stored: Any, at: int, blocks: Any, i: int) -> None:
        if scale_vectors == 1:
            store(stored, at, scales_of(blocks, i))
        else:
            scales, minima = scales_of(blocks, i)
            store(stored, at, scales)
            store(stored, at + LANES, minima)

    return put


def four_rows_of_groups(block: int, block_bytes: int, piece: int, weights: Callable[..., Any]) -> Any:
    """Make the gemv kernel of a format with one scale per block of up to 128 weights.

    A block has `block` weights. The registers cannot hold them all, so the kernel unpacks a block in pieces of `piece`
    weights. `weights(blocks, at, p)` returns the weights of piece p of the block at byte `at`, as a tuple of vectors.
    """

    def make(n_vectors: int) -> Any:
        n_rows, pieces = rows_together(n_vectors), block // piece

        def weights_of(address: int, at: int, p: int, scales: int) -> Any:
            return weights(raw(address), at, p)

        zeros, add = no_sums(n_rows * n_vectors), add_products(n_rows, n_vectors, piece // LANES, weights_of)
        add_to = add_totals(n_rows, n_vectors)

        @jit
        def multiply(
            rows: Any, n_columns: int, panel: Any, first: int, y: Any, at: int, apart: int, y_row: int, ahead: int,
            scratch: int,
        ) -> None:  # fmt: skip
            i = 0
            for stretch in range(0, n_columns, STRETCH):
                sums = zeros()
                for column in range(stretch, min(stretch + STRETCH, n_columns), block):
                    for r in range(n_rows):
                        prefetch(raw(rows[r]), i + ahead)
                    for p in range(pieces):
                        sums = add(rows, i, p, 0, panel, first + (column + piece * p) * n_vectors, sums)
                    i += block_bytes
                add_to(y, at, apart, y_row, sums)

        return multiply

    return _for_panels(make)


def four_rows_by_parts(
    block_bytes: int, scales_of: Callable[..., Any], part: Callable[..., Any], scale_vectors: int = 1
) -> Any:
    """Make the gemv kernel of a format whose blocks have 256 weights.

    A part is 64 weights of a block. Each multiply-add to a row's sum waits for the previous one. To overlap the waits
    of up to four rows, the kernel multiplies one part of each row, then the next part of each row.

    `scales_of(blocks, at)` returns the scales and minima of the block at byte `at` in `scale_vectors` SIMD vectors: one
    vector of 16 numbers (8 scales and 8 minima, or scales only), or two vectors (16 scales, then 16 minima).
    `part(blocks, at, p, scales, i)` returns the 64 weights of part p of this block in four SIMD vectors; the block's
    scales begin at `scales[i]`.
    """
    put, scales_of_row = _store_scales(scales_of, scale_vectors), LANES * scale_vectors

    def make(n_vectors: int) -> Any:
        n_rows = rows_together(n_vectors)

        def weights_of(address: int, at: int, p: int, scales: int) -> Any:
            return part(raw(address), at, p, floats(scales), 0)

        zeros, add = (
            no_sums(n_rows * n_vectors),
            add_products(n_rows, n_vectors, 64 // LANES, weights_of, scale_vectors),
        )
        add_to = add_totals(n_rows, n_vectors)

        @jit
        def multiply(
            rows: Any, n_columns: int, panel: Any, first: int, y: Any, at: int, apart: int, y_row: int, ahead: int,
            scratch: int,
        ) -> None:  # fmt: skip
            # Copying a scale to all lanes of a vector takes one instruction if the scale is in memory, but two if it is
            # in a register. So the scales of the next STRETCH columns are first stored to memory.
            stored, scales, i = floats(scratch), hidden(scratch), 0
            for stretch in range(0, n_columns, STRETCH):
                sums = zeros()
                blocks = min(STRETCH, n_columns - stretch) // 256
                for block in range(blocks):
                    for r in range(n_rows):
                        put(stored, scales_of_row * (block * n_rows + r), raw(rows[r]), i + block * block_bytes)
                # This is a single loop over the parts of all blocks. LLVM would unroll an inner loop over the four
                # parts of a block, and run out of registers.
                for p in range(4 * blocks):
                    at_block, q = i + p // 4 * block_bytes, p % 4
                    for r in range(n_rows):
                        prefetch(raw(rows[r]), at_block + q * LINE_BYTES + ahead)
                    own = scales + 4 * scales_of_row * n_rows * (p // 4)
                    sums = add(rows, at_block, q, own, panel, first + (stretch + 64 * p) * n_vectors, sums)
                i += blocks * block_bytes
                add_to(y, at, apart, y_row, sums)

        return multiply

    return _for_panels(make)


def _for_panels(make: Callable[[int], Any]) -> Any:
    """Make a format's gemv kernel (`Format.four_rows` in `build/library.py`) for panels of all sizes.

    The kernel works on four ranges of rows. `make(n_vectors)` makes its inner function, which multiplies a panel with
    4, 2 or 1 rows at a time (`rows_together`), each from another range.
    """

    def choose(sizes: tuple[int, ...]) -> Any:
        size, n_rows = sizes[0], rows_together(sizes[0])
        kernel = make(size)
        others = choose(sizes[1:]) if len(sizes) > 1 else None

        @jit
        def multiply(
            n_vectors: int, rows: Any, last: Any, step: int, count: int, n_columns: int, panel: Any, first: int, y: Any,
            at: int, apart: int, y_row: int, ahead: int, scratch: int,
        ) -> None:  # fmt: skip
            """Add `dot(row r of range i, input vector t)` to `y[at + i * apart + r + t * y_row]`.

            The terms of a dot product are added in the order that `tile.py` defines. The kernel multiplies one row of
            each of the four ranges at the same time (`gemv.py` has the reason). If there are too few registers, it
            multiplies rows of only two ranges or of one range at the same time.

            Args:
                n_vectors: number of input vectors of the panel, one of `PANEL_SIZES`.
                rows: addresses of the first row of each range.
                last: for each range, the address of its matrix's last row, which is read in place of rows beyond it.
                step: bytes from one row to the next.
                count: rows of each range.
                n_columns: number of columns to multiply.
                panel: array that contains the panel, (columns / 16, n_vectors, 16).
                first: index in `panel` of input vector 0's element in the first column to multiply.
                y: array of products.
                at: index in y of the product of row 0 of range 0 with input vector 0.
                apart: distance in y from one range to the next.
                y_row: distance in y from one input vector to the next.
                ahead: prefetch distance in bytes.
                scratch: address of `FORMAT_SCRATCH` bytes of scratch memory.
            """
            if others is not None and n_vectors != size:
                others(n_vectors, rows, last, step, count, n_columns, panel, first, y, at, apart, y_row, ahead, scratch)
                return
            for r in range(count):
                i, to = r * step, at + r
                a, b = min(rows[0] + i, last[0]), min(rows[1] + i, last[1])
                c, d = min(rows[2] + i, last[2]), min(rows[3] + i, last[3])
                if n_rows == 4:
                    kernel((a, b, c, d), n_columns, panel, first, y, to, apart, y_row, ahead, scratch)
                elif n_rows == 2:
                    kernel((a, b), n_columns, panel, first, y, to, apart, y_row, ahead, scratch)
                    kernel((c, d), n_columns, panel, first, y, to + 2 * apart, apart, y_row, ahead, scratch)
                else:
                    kernel((a,), n_columns, panel, first, y, to, apart, y_row, ahead, scratch)
                    kernel((b,), n_columns, panel, first, y, to + apart, apart, y_row, ahead, scratch)
                    kernel((c,), n_columns, panel, first, y, to + 2 * apart, apart, y_row, ahead, scratch)
                    kernel((d,), n_columns, panel, first, y, to + 3 * apart, apart, y_row, ahead, scratch)

        return multiply

    return choose(PANEL_SIZES)


def dequantize_32(block_bytes: int, weights: Callable[..., Any]) -> Any:
    """Make the kernel `dequantize` of a format with blocks of 32 weights.

    `weights(blocks, at)` returns the weights of the block at byte `at` in two vectors. The kernel writes the float32
    weights of blocks `first` to `last - 1` to `out[to:]`; `expand` (`format.py`) describes their arrangement.
    """

    @jit
    def dequantize(blocks: Any, first: int, last: int, out: Any, to: int, step: int, apart: int, scratch: int) -> None:
        for block in range(first, last):
            low, high = weights(blocks, block * block_bytes)
            store_parts(out, to, apart, low)
            store_parts(out, to + step, apart, high)
            to += 2 * step

    return dequantize


def dequantize_pieces(block: int, block_bytes: int, weights: Callable[..., Any]) -> Any:
    """Make the kernel `dequantize` of a format; the arguments are those of `four_rows_of_groups` for `piece = 32`."""

    @jit
    def dequantize(blocks: Any, first: int, last: int, out: Any, to: int, step: int, apart: int, scratch: int) -> None:
        for i in range(first * (block // 32), last * (block // 32)):
            low, high = weights(blocks, i // (block // 32) * block_bytes, i % (block // 32))
            store_parts(out, to, apart, low)
            store_parts(out, to + step, apart, high)
            to += 2 * step

    return dequantize


def dequantize_by_parts(
    block_bytes: int, scales_of: Callable[..., Any], part: Callable[..., Any], scale_vectors: int = 1
) -> Any:
    """Make the kernel `dequantize` of a format; the arguments are those of `four_rows_by_parts`."""
    put = _store_scales(scales_of, scale_vectors)

    @jit
    def dequantize(blocks: Any, first: int, last: int, out: Any, to: int, step: int, apart: int, scratch: int) -> None:
        stored, scales = floats(scratch), floats(hidden(scratch))
        for block in range(first, last):
            at = block * block_bytes
            put(stored, 0, blocks, at)
            for p in range(min(4, 4 * (last - block))):
                a, b, c, d = part(blocks, at, p, scales, 0)
                store_parts(out, to, apart, a)
                store_parts(out, to + step, apart, b)
                store_parts(out, to + 2 * step, apart, c)
                store_parts(out, to + 3 * step, apart, d)
                to += 4 * step

    return dequantize
