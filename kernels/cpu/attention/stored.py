"""Read and write stored keys and values: float32, float16, bfloat16, or Q8_0 in blocks along the head dim.

A row is the key or the value of one head and token. Rows are rounded when they are written, and attention converts
stored rows to float32. So the bits of an output depend only on the stored numbers, and not on which keys are new in the
pass. `mlx_engine/quant` rounds to the same bits: floats are rounded to the nearest, ties to even, and Q8_0 blocks are
made as in ggml.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import KV_BF16, KV_F16, KV_F32, KV_Q8_0, LANES
from ..build.memory import floats
from ..build.vectors import call_llvm, everywhere, store, vector
from ..products.tile import Read, dots_of, weighted_of

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
# The number of elements and of bytes of a Q8_0 block, which has a float16 scale, then 32 quants of one signed byte.
_BLOCK, _BLOCK_BYTES = 32, 34
_INFINITE = 0x7F800000


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _ints(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _row_at(builder: Any, row: Any, at: Any, kind: Any) -> Any:
    """Generate the load of a number or vector of type `kind` that begins at byte `at` of a row."""
    loaded = builder.load(builder.bitcast(builder.gep(row, [at]), kind.as_pointer()))
    loaded.align = 1
    return loaded


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def read_f32(builder: Any, row: Any, column: Any, kind: Any) -> Any:
    """Generate the load of a row's float32 elements from `column` on, as a vector of type `kind` (see `tile.Read`)."""
    return _row_at(builder, row, builder.mul(column, _number(4)), kind)


def read_f16(builder: Any, row: Any, column: Any, kind: Any) -> Any:
    """Do as `read_f32`, but for float16 elements, which are converted to floats."""
    return builder.fpext(_row_at(builder, row, builder.mul(column, _number(2)), ir.VectorType(_F16, kind.count)), kind)


def read_bf16(builder: Any, row: Any, column: Any, kind: Any) -> Any:
    """Do as `read_f32`, but for bfloat16 elements, whose bits are the upper halves of floats."""
    wide = ir.VectorType(_I32, kind.count)
    halves = _row_at(builder, row, builder.mul(column, _number(2)), ir.VectorType(_I16, kind.count))
    return builder.bitcast(builder.shl(builder.zext(halves, wide), _ints(wide, 16)), kind)


def read_q8_0(builder: Any, row: Any, column: Any, kind: Any) -> Any:
    """Do as `read_f32`, but for elements of one Q8_0 block: `quant * scale`, which float32 represents exactly."""
    n, in_block = kind.count, builder.and_(column, _number(_BLOCK - 1))
    at = builder.mul(builder.udiv(column, _number(_BLOCK)), _number(_BLOCK_BYTES))
    half = _row_at(builder, row, at, _I16)
    # The scale is copied to all lanes before the conversion, because x86-64's F16C converts only vectors.
    scale = builder.fpext(builder.bitcast(everywhere(builder, half, n), ir.VectorType(_F16, n)), kind)
    quants = _row_at(builder, row, builder.add(builder.add(at, in_block), _number(2)), ir.VectorType(_I8, n))
    return builder.fmul(scale, builder.sitofp(builder.sext(quants, ir.VectorType(_I32, n)), kind))


def _loads(read: Read) -> Any:
    """Return `load(address, column)`, which loads 16 elements of the row at `address` from `column` on, as floats."""

    @intrinsic
    def load(typing: Any, address: Any, column: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row = builder.inttoptr(args[0], _I8.as_pointer())
            return read(builder, row, args[1], ir.VectorType(_F32, LANES))

        return vector(types.int64, types.int64), generate

    return load


_load_f16, _load_bf16, _load_q8_0 = map(_loads, (read_f16, read_bf16, read_q8_0))
_dots_f32, _sum_f32 = dots_of(read_f32, 128), weighted_of(read_f32, widens=False)
_dots_f16, _dots_bf16, _dots_q8_0 = dots_of(read_f16, 64), dots_of(read_bf16, 64), dots_of(read_q8_0, _BLOCK_BYTES)
_sum_f16, _sum_bf16, _sum_q8_0 = (weighted_of(read, widens=True) for read in (read_f16, read_bf16, read_q8_0))


@intrinsic
def _put_f16(typing: Any, address: Any, x: Any) -> Any:
    """Round the 16 floats at address `x` to the nearest float16 (ties to even), and write them to `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.fptrunc(_load(builder, args[1], ir.VectorType(_F32, LANES)), ir.VectorType(_F16, LANES))
        _store(builder, rounded, args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _put_bf16(typing: Any, address: Any, x: Any) -> Any:
    """Round the 16 floats at address `x` to the nearest bfloat16 (ties to even), and write them to `address`.

    NaN is not rounded, because the carry of rounding could change it to a number; it becomes a quiet NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(_I32, LANES)
        bits = _load(builder, args[1], wide)
        odd = builder.and_(builder.lshr(bits, _ints(wide, 16)), _ints(wide, 1))
        rounded = builder.add(builder.add(bits, _ints(wide, 0x7FFF)), odd)
        sizes = builder.and_(bits, _ints(wide, 0x7FFFFFFF))
        quiet = builder.or_(bits, _ints(wide, 0x400000))
        kept = builder.select(builder.icmp_unsigned(">", sizes, _ints(wide, _INFINITE)), quiet, rounded)
        _store(builder, builder.trunc(builder.lshr(kept, _ints(wide, 16)), ir.VectorType(_I16, LANES)), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _put_q8_0(typing: Any, address: Any, x: Any) -> Any:
    """Quantise the 32 floats at address `x` to a Q8_0 block at `address`.

    An element's quant is 0 if the product of the element and 1 / scale is not finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, vectors = ir.VectorType(_I32, _BLOCK), ir.VectorType(_F32, _BLOCK)
        bits = _load(builder, args[1], wide)
        sizes = builder.and_(bits, _ints(wide, 0x7FFFFFFF))
        # Read as integers without the sign bit, NaN is larger than infinity, and infinity is larger than all finite
        # numbers. So `top` is NaN if an element is NaN.
        top = call_llvm(builder, f"llvm.vector.reduce.umax.v{_BLOCK}i32", _I32, [sizes])
        scale = builder.fdiv(builder.bitcast(top, _F32), ir.Constant(_F32, 127.0))
        nothing = ir.Constant(_F32, 0.0)
        inverse = builder.fdiv(ir.Constant(_F32, 1.0), scale)
        factor = builder.select(builder.fcmp_ordered("==", scale, nothing), nothing, inverse)
        products = builder.fmul(builder.bitcast(bits, vectors), everywhere(builder, factor, _BLOCK))
        # `half` is the largest float below 0.5: with 0.5, the product 0.49999997 would be rounded to 1 and not to 0.
        half = ir.Constant(vectors, [0.49999997019767761] * _BLOCK)
        away = call_llvm(builder, f"llvm.copysign.v{_BLOCK}f32", vectors, [half, products])
        rounded = builder.fadd(products, away)
        found = builder.and_(builder.bitcast(products, wide), _ints(wide, 0x7FFFFFFF))
        is_finite = builder.icmp_unsigned("<", found, _ints(wide, _INFINITE))
        kept = builder.select(is_finite, rounded, ir.Constant(vectors, None))
        _store(builder, builder.fptrunc(scale, _F16), args[0])
        quants = builder.trunc(builder.fptosi(kept, wide), ir.VectorType(_I8, _BLOCK))
        _store(builder, quants, builder.add(args[0], ir.Constant(ir.IntType(64), 2)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@jit
def row_bytes(kind: int, width: int) -> int:
    """Return how many bytes a stored row of `width` elements takes."""
    if kind == KV_Q8_0:
        return width // _BLOCK * _BLOCK_BYTES
    return 4 * width if kind == KV_F32 else 2 * width


@jit
def put_row(kind: int, x: int, width: int, row: int) -> None:
    """Convert `width` floats at address `x` to a row of type `kind` (not KV_F32), and write it to address `row`."""
    if kind == KV_F16:
        for e in range(0, width, LANES):
            _put_f16(row + 2 * e, x + 4 * e)
    elif kind == KV_BF16:
        for e in range(0, width, LANES):
            _put_bf16(row + 2 * e, x + 4 * e)
    else:
        for b in range(width // _BLOCK):
            _put_q8_0(row + _BLOCK_BYTES * b, x + 4 * _BLOCK * b)


@jit
def expand_rows(kind: int, rows: int, n: int, out: int) -> None:
    """Convert adjacent rows of type `kind` (not KV_F32), n elements in total, to floats at address `out`."""
    to = floats(out)
    if kind == KV_F16:
        for e in range(0, n, LANES):
            store(to, e, _load_f16(rows, e))
    elif kind == KV_BF16:
        for e in range(0, n, LANES):
            store(to, e, _load_bf16(rows, e))
    else:
        for e in range(0, n, _BLOCK):
            first, second = _load_q8_0(rows, e), _load_q8_0(rows, e + LANES)
            store(to, e, first)
            store(to, e + LANES, second)


@jit
def set_dots(
    kind: int, w: int, w_row: int, n_rows: int, x: Any, x_at: int, x_row: int, n_vectors: int, n: int, y: Any,
    y_at: int, y_row: int, ahead: int, also: int,
) -> None:  # fmt: skip
    """Write the dot products of stored rows and vectors. `tile.dots_of` describes the arguments."""
    if kind == KV_F32:
        _dots_f32(w, w_row, n_rows, x, x_at, x_row, n_vectors, n, y, y_at, y_row, ahead, also)
    elif kind == KV_F16:
        _dots_f16(w, w_row, n_rows, x, x_at, x_row, n_vectors, n, y, y_at, y_row, ahead, also)
    elif kind == KV_BF16:
        _dots_bf16(w, w_row, n_rows, x, x_at, x_row, n_vectors, n, y, y_at, y_row, ahead, also)
    else:
        _dots_q8_0(w, w_row, n_rows, x, x_at, x_row, n_vectors, n, y, y_at, y_row, ahead, also)


@jit
def sum_weighted(
    kind: int, weights: Any, w_at: int, w_row: int, n_sums: int, rows: int, row: int, n: int, width: int, y: Any,
    y_at: int, y_row: int, more: int,
) -> None:  # fmt: skip
    """Write weighted sums of stored rows. `tile.weighted_of` describes the arguments."""
    if kind == KV_F32:
        _sum_f32(weights, w_at, w_row, n_sums, rows, row, n, width, y, y_at, y_row, more)
    elif kind == KV_F16:
        _sum_f16(weights, w_at, w_row, n_sums, rows, row, n, width, y, y_at, y_row, more)
    elif kind == KV_BF16:
        _sum_bf16(weights, w_at, w_row, n_sums, rows, row, n, width, y, y_at, y_row, more)
    else:
        _sum_q8_0(weights, w_at, w_row, n_sums, rows, row, n, width, y, y_at, y_row, more)
