"""SIMD vectors of 16 float64, for sums that need more precision than float32. `vectors.py` has the arithmetic."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .layout import LANES
from .vectors import Vector, everywhere, vector

_F64, _I64 = ir.DoubleType(), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F64, LANES), ir.VectorType(_I64, LANES)
_FRACTION_BITS = 52

doubles = Vector(types.float64, _VECTOR)


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """Return a float64 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, args[0])

    return doubles(types.float64), generate


@intrinsic
def widen(typing: Any, a: Any) -> Any:
    """Return a float32 vector as float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(args[0], _VECTOR)

    return doubles(vector), generate


@intrinsic
def add_to_exponent(typing: Any, a: Any, n: Any) -> Any:
    """Return `a * 2**n`, a normal number; the low 12 bits of each lane of `n` are the integer n."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, n = (builder.bitcast(arg, _INTS) for arg in args)
        shift = ir.Constant(_INTS, [_FRACTION_BITS] * LANES)
        return builder.bitcast(builder.add(a, builder.shl(n, shift)), _VECTOR)

    return doubles(doubles, doubles), generate
