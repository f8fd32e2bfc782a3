"""The sum of the exponentials of a row of logits, in float64: the divisor of softmax. Reference: `order_numpy.py`.

The order of summation is fixed: lane i % 16 adds element i, then lanes that are 8, 4, 2 and 1 apart are added. The
exponential uses additions, multiplications and a rounding to integers, but no fused multiply-add, which NumPy lacks.
So all processors and NumPy give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import entry, jit
from ..build.layout import LANES
from ..build.memory import doubles, floats
from ..build.vectors import Vector, add, between, everywhere, get, larger, load, mul, sub, total, vector
from ..build.vectors import splat as splat_float
from .order_numpy import COEFFICIENTS, LEAST, LOG2_E, ROUNDER

_F64, _I64 = ir.DoubleType(), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F64, LANES), ir.VectorType(_I64, LANES)
_FRACTION_BITS = 52

_doubles = Vector(types.float64, _VECTOR)


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """Return a vector with the float64 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, args[0])

    return _doubles(types.float64), generate


@intrinsic
def widen(typing: Any, a: Any) -> Any:
    """Convert a float32 vector to float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(args[0], _VECTOR)

    return _doubles(vector), generate


@intrinsic
def add_to_exponent(typing: Any, a: Any, n: Any) -> Any:
    """Return `a * 2**k`, which must be a normal number, given `n = ROUNDER + k` with an integer k.

    The low 12 bits of n are k in two's complement. They are added to the high 12 bits of a (sign and exponent).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, n = (builder.bitcast(arg, _INTS) for arg in args)
        shift = ir.Constant(_INTS, [_FRACTION_BITS] * LANES)
        return builder.bitcast(builder.add(a, builder.shl(n, shift)), _VECTOR)

    return _doubles(_doubles, _doubles), generate


_0, _1, _2, _3, _4, _5, _6 = COEFFICIENTS


@jit
def exp(x: Any) -> Any:
    """Return `e**x` for x <= 0 in float64, or `e**LEAST` for x < LEAST, computed as in `order_numpy.exp`."""
    x = mul(larger(splat(LEAST), x), splat(LOG2_E))
    n = add(x, splat(ROUNDER))
    r = sub(x, sub(n, splat(ROUNDER)))
    p = add(mul(splat(_6), r), splat(_5))
    p = add(mul(p, r), splat(_4))
    p = add(mul(p, r), splat(_3))
    p = add(mul(p, r), splat(_2))
    p = add(mul(p, r), splat(_1))
    p = add(mul(p, r), splat(_0))
    p = mul(p, p)
    p = mul(p, p)
    p = mul(p, p)
    return add_to_exponent(p, n)


@entry
def sum_exp(row: int, n: int, top: float, out: int) -> None:
    """Write `sum(exp(row - top))`, a float64, to address `out`; `top` is the largest of the n float32s at `row`."""
    x, largest, sums = floats(row), splat(top), splat(0.0)
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        sums = add(sums, exp(sub(widen(load(x, i)), largest)))
    if whole < n:
        # Lanes without an element add e**LEAST, which changes no bit of the total, because the total is >= 1:
        # the largest element adds 1.
        last = splat_float(-math.inf)
        for i in range(whole, n):
            last = between(i - whole, i - whole + 1, splat_float(get(x, i)), last)
        sums = add(sums, exp(sub(widen(last), largest)))
    doubles(out)[0] = total(sums)
