"""exp, exp2 and tanh of SIMD vectors of 16 floats, for activation functions and softmax."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from .jit import jit
from .layout import LANES
from .vectors import add, call_llvm, div, fma, larger, mul, smaller, splat, sub, vector

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def _whole(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


@intrinsic
def _round(typing: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.rint.v{LANES}f32", _VECTOR, list(args))

    return vector(vector), generate


@intrinsic
def _times_power_of_two(typing: Any, a: Any, n: Any) -> Any:
    """Return `a * 2**n` for whole n from -252 to 254. Multiply twice, because `2**n` alone may overflow."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, n = args
        whole = builder.fptosi(n, _INTS)
        half = builder.ashr(whole, _whole(1))
        for part in (half, builder.sub(whole, half)):
            a = builder.fmul(a, builder.bitcast(builder.shl(builder.add(part, _whole(127)), _whole(23)), _VECTOR))
        return a

    return vector(vector, vector), generate


@jit
def exp(x: Any) -> Any:
    """Return `e**x` within one unit in the last place; infinity or 0 outside the range of float32, NaN for NaN.

    Let n be x / ln 2, rounded to an integer, and r = x - n ln 2. Then `e**x = 2**n * e**r`. To compute r, ln 2 is split
    into a sum of two numbers. The first has few bits, so its product with n is exact. e**r is computed by the Taylor
    polynomial of degree 7; the next term would be below 2**-27.
    """
    x = larger(splat(-150.0), smaller(splat(150.0), x))
    n = _round(mul(x, splat(1.4426950408889634)))
    r = fma(n, splat(-0.693359375), x)
    r = fma(n, splat(2.12194440054690583e-4), r)
    p = fma(r, splat(1 / 5040), splat(1 / 720))
    p = fma(p, r, splat(1 / 120))
    p = fma(p, r, splat(1 / 24))
    p = fma(p, r, splat(1 / 6))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    return _times_power_of_two(p, n)


@jit
def tanh(x: Any) -> Any:
    """Return `tanh(x)` within 3 units in the last place, also near 0; NaN for NaN.

    `tanh(x) = y / (y + 2)` with `y = e**(2 x) - 1`. As in `exp`, 2 x = n ln 2 + r, so y is
    `2**n (e**r - 1) + (2**n - 1)`. For small x, n is 0, so y is `e**r - 1`, which a polynomial gives without
    cancellation. x is limited to [-10, 10], because outside of this range, tanh(x) is 1 or -1 in float32.
    """
    x = larger(splat(-20.0), smaller(splat(20.0), add(x, x)))
    n = _round(mul(x, splat(1.4426950408889634)))
    r = fma(n, splat(-0.693359375), x)
    r = fma(n, splat(2.12194440054690583e-4), r)
    p = fma(r, splat(1 / 5040), splat(1 / 720))
    p = fma(p, r, splat(1 / 120))
    p = fma(p, r, splat(1 / 24))
    p = fma(p, r, splat(1 / 6))
    p = fma(p, r, splat(0.5))
    p = fma(p, mul(r, r), r)
    power = _times_power_of_two(splat(1.0), n)
    y = fma(p, power, sub(power, splat(1.0)))
    return div(y, add(y, splat(2.0)))


@intrinsic
def _exponent_plus(typing: Any, a: Any, n: Any) -> Any:
    """Return `a * 2**n` for whole n, by adding n to the exponent bits of a.

    `a * 2**n` must be at least 2**-127. If `a * 2**n` is below 2**-126, the smallest normal float32, the returned
    number is too small: 0 in place of 2**-127.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, n = args
        shifted = builder.shl(builder.fptosi(n, _INTS), _whole(23))
        return builder.bitcast(builder.add(builder.bitcast(a, _INTS), shifted), _VECTOR)

    return vector(vector, vector), generate


# Coefficients of x**2 to x**7 in the Taylor polynomial of 2**x. For |x| <= 1/2, the term of x**8 is below 2**-27.
_2, _3, _4, _5, _6, _7 = (math.log(2) ** k / math.factorial(k) for k in range(2, 8))


@jit
def exp2_below(x: Any) -> Any:
    """Return `2**x` for x <= 0, within one unit in the last place for x >= -126.

    For x < -126, the result is from 0 to 2**-126; for x <= -127, it is 0. `exp2_below` takes half the time of `exp`,
    because the remainder `x - n` is exact, and x is limited on one side only.
    """
    x = larger(splat(-127.0), x)
    n = _round(x)
    r = sub(x, n)
    p = fma(r, splat(_7), splat(_6))
    p = fma(p, r, splat(_5))
    p = fma(p, r, splat(_4))
    p = fma(p, r, splat(_3))
    p = fma(p, r, splat(_2))
    p = fma(p, r, splat(math.log(2)))
    p = fma(p, r, splat(1.0))
    return _exponent_plus(p, n)
