"""Parts of the gemv kernels (`rows.py`): dot products of up to four weight rows with the vectors of a panel.

A panel is one or more packed input vectors (`products/gemv.py`). A dot product has 16 partial sums
(`products/tile.py`), so each pair of a row and an input vector has one SIMD vector of sums. The sums of all pairs are a
tuple of SIMD vectors, which stay in registers: first those of row 0 with all input vectors, then those of row 1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.layout import LANES
from ..build.vectors import call_llvm, element_address, fold_all, register_lanes, vector

_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_POINTER, _FMA = _VECTOR.as_pointer(), f"llvm.fma.v{LANES}f32"

# Whether one register holds 16 lanes (AVX-512).
WIDE = register_lanes() == LANES
# The sizes of panels (numbers of input vectors) that have kernels. A panel of another size would be no faster than two
# smaller panels.
PANEL_SIZES = (1, 2, 3, 4, 5, 6, 8, 9) if WIDE else (1, 2, 3, 4, 5, 6)
# Maps the number of lanes of a register to the largest number of pairs (row, input vector) whose sums are kept in
# registers when two or four rows are multiplied together. The 16 sums of a pair take one of 32 registers with AVX-512,
# two of 16 with AVX2, four of 32 with NEON. Weights, scales and elements of the panel need the remaining registers.
_PAIRS = {16: 18, 8: 4, 4: 4}


def rows_together(n_vectors: int) -> int:
    """Return how many rows are multiplied together with a panel: 4, 2 or 1."""
    return next(rows for rows in (4, 2, 1) if rows == 1 or rows * n_vectors <= _PAIRS[register_lanes()])


def no_sums(n: int, kind: Any = vector) -> Any:
    """Make the function that returns a tuple of n vectors of zeros, the initial sums; `kind` is their type."""

    @intrinsic
    def zeros(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.make_tuple(builder, signature.return_type, [ir.Constant(kind.llvm, None)] * n)

        return types.UniTuple(kind, n)(), generate

    return zeros


def add_products(
    n_rows: int, n_vectors: int, n_weights: int, weights: Callable[..., Any], scale_vectors: int = 1
) -> Any:
    """Make the function that multiplies a piece of each row with the panel and adds the products to the pairs' sums.

    A piece is a block, or the part of a block that is unpacked at a time. `weights(row, at, p, scales)` returns the
    weights of a piece as a tuple of `n_weights` SIMD vectors. `row` is the address of the row, `at` the byte offset of
    the block in the row, p the number of the piece in the block. Only the formats of `rows.four_rows_by_parts` use
    `scales`: it is the address, in scratch memory, of the scales of this row's block, which take `scale_vectors` SIMD
    vectors.
    """
    found = types.UniTuple(vector, n_weights)(*[types.int64] * 4)
    # Besides all sums, the registers of AVX2 can hold the weights of only one row, so a fence separates the rows. If a
    # piece is a single SIMD vector, there is no fence, so that LLVM can load the panel's vectors once for all rows.
    is_tight = register_lanes() == 8 and n_weights > 1

    @intrinsic
    def add(typing: Any, rows: Any, at: Any, piece: Any, scales: Any, panel: Any, at_panel: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, at, piece, scales, panel, at_panel, sums = args
            places = [builder.extract_value(sums, p) for p in range(n_rows * n_vectors)]
            x = builder.bitcast(element_address(context, builder, signature.args[4], panel, at_panel), _POINTER)
            for r in range(n_rows):
                if r and is_tight:
                    _fence(builder)
                own = builder.add(scales, ir.Constant(_I64, 4 * LANES * scale_vectors * r))
                words = [builder.extract_value(rows, r), at, piece, own]
                result = context.compile_internal(builder, weights, found, words)
                for w in range(n_weights):
                    weight = builder.extract_value(result, w)
                    for t in range(n_vectors):
                        p = r * n_vectors + t
                        loaded = builder.load(builder.gep(x, [ir.Constant(_I64, w * n_vectors + t)]))
                        loaded.align = 4
                        places[p] = call_llvm(builder, _FMA, _VECTOR, [weight, loaded, places[p]])
            return context.make_tuple(builder, signature.return_type, places)

        n = types.int64
        return sums(types.UniTuple(n, n_rows), n, n, n, panel, n, sums), generate

    return add


def _fence(builder: Any) -> None:
    """Prevent LLVM from moving later loads before earlier products: this would take more registers than there are."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def add_totals(n_rows: int, n_vectors: int) -> Any:
    """Make the function that adds the total of each pair (row r, input vector t) to `y[at + r * apart + t * y_row]`."""

    @intrinsic
    def add(typing: Any, y: Any, at: Any, apart: Any, y_row: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, at, apart, y_row, sums = args
            first = element_address(context, builder, signature.args[0], y, at)
            places = [
                builder.gep(first, [builder.add(builder.mul(apart, _whole(r)), builder.mul(y_row, _whole(t)))])
                for r in range(n_rows)
                for t in range(n_vectors)
            ]
            totals = [builder.extract_value(sums, p) for p in range(len(places))]
            for place, total in zip(places, fold_all(builder, totals), strict=True):
                builder.store(builder.fadd(builder.load(place), total), place)
            return context.get_dummy_value()

        n = types.int64
        return types.void(y, n, n, n, sums), generate

    return add


def _whole(n: int) -> Any:
    return ir.Constant(_I64, n)
