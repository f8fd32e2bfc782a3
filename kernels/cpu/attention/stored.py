"""Keys and values as a store holds them: float32, float16, bfloat16, or Q8_0 along the head.

The new rows of a pass are rounded when they are written. Attention expands them to float32 a block of keys at a time,
and its sums are those of float32: the bits of an output follow from the stored numbers alone, for every type. Rounding
is that of `mlx_engine/quant` (nearest even; Q8_0 as in ggml), to the last bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import KV_BF16, KV_F16, KV_F32, KV_Q8_0, LANES
from ..build.memory import floats, raw
from ..build.vectors import call_llvm, everywhere, load_half_splat, load_int8, mul, store, vector

_I8, _I16, _I32, _F16, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
# Elements of a Q8_0 block, and its bytes: a float16 scale, then signed bytes.
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


@intrinsic
def _load_f16(typing: Any, address: Any) -> Any:
    """Load 16 float16 numbers as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(_load(builder, args[0], ir.VectorType(_F16, LANES)), ir.VectorType(_F32, LANES))

    return vector(types.int64), generate


@intrinsic
def _load_bf16(typing: Any, address: Any) -> Any:
    """Load 16 bfloat16 numbers, the upper halves of float32 numbers, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(_I32, LANES)
        halves = builder.zext(_load(builder, args[0], ir.VectorType(_I16, LANES)), wide)
        return builder.bitcast(builder.shl(halves, _ints(wide, 16)), ir.VectorType(_F32, LANES))

    return vector(types.int64), generate


@intrinsic
def _put_f16(typing: Any, address: Any, x: Any) -> Any:
    """Round 16 floats at address `x` to float16, to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.fptrunc(_load(builder, args[1], ir.VectorType(_F32, LANES)), ir.VectorType(_F16, LANES))
        _store(builder, rounded, args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _put_bf16(typing: Any, address: Any, x: Any) -> Any:
    """Round 16 floats at address `x` to bfloat16, to nearest even.

    NaN becomes a quiet NaN, because a carry could turn it into an infinity.
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
    """Quantise the 32 floats at address `x` to a block of Q8_0. Quants are 0 if they would not be finite."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, vectors = ir.VectorType(_I32, _BLOCK), ir.VectorType(_F32, _BLOCK)
        bits = _load(builder, args[1], wide)
        sizes = builder.and_(bits, _ints(wide, 0x7FFFFFFF))
        # Compared as integers, NaN is larger than infinity, and infinity than all numbers.
        top = call_llvm(builder, f"llvm.vector.reduce.umax.v{_BLOCK}i32", _I32, [sizes])
        scale = builder.fdiv(builder.bitcast(top, _F32), ir.Constant(_F32, 127.0))
        nothing = ir.Constant(_F32, 0.0)
        inverse = builder.fdiv(ir.Constant(_F32, 1.0), scale)
        factor = builder.select(builder.fcmp_ordered("==", scale, nothing), nothing, inverse)
        products = builder.fmul(builder.bitcast(bits, vectors), everywhere(builder, factor, _BLOCK))
        # The largest float below 0.5: adding 0.5 itself would round 0.49999997 up.
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
    """Return the bytes of a stored row of `width` elements."""
    if kind == KV_Q8_0:
        return width // _BLOCK * _BLOCK_BYTES
    return 4 * width if kind == KV_F32 else 2 * width


@jit
def put_row(kind: int, x: int, width: int, row: int) -> None:
    """Round `width` floats at address `x` to a row at address `row`, of a type other than float32."""
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
    """Expand n elements, whole rows from address `rows` on of a type other than float32, to floats at address `out`."""
    to = floats(out)
    if kind == KV_F16:
        for e in range(0, n, LANES):
            store(to, e, _load_f16(rows + 2 * e))
    elif kind == KV_BF16:
        for e in range(0, n, LANES):
            store(to, e, _load_bf16(rows + 2 * e))
    else:
        blocks = raw(rows)
        for b in range(n // _BLOCK):
            at = _BLOCK_BYTES * b
            scale = load_half_splat(blocks, at)
            store(to, _BLOCK * b, mul(scale, load_int8(blocks, at + 2)))
            store(to, _BLOCK * b + LANES, mul(scale, load_int8(blocks, at + 2 + LANES)))
