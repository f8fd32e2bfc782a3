"""Vectors of 32 floats for Numba: the few LLVM operations that its compiler would not find by itself.

32 is a Q8_0 block. LLVM cuts the vector into the registers that the processor has: two of AVX-512, four of AVX2,
eight of NEON. Arguments called `at` count bytes in byte arrays and elements in float arrays; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 32

_F16, _F32, _I8, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(_F32, LANES)


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _Vector()


@register_model(_Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _call(builder: Any, name: str, result: Any, arguments: list[Any], **flags: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **flags)


@intrinsic
def zeros(typing: Any) -> Any:
    """All lanes 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, None)

    return vector(), generate


@intrinsic
def load(typing: Any, floats: Any, at: Any) -> Any:
    """32 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
        loaded.align = 4
        return loaded

    return vector(floats, types.int64), generate


@intrinsic
def store(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Write 32 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args[:2])
        builder.store(args[2], builder.bitcast(address, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(floats, types.int64, vector), generate


@intrinsic
def load_int8(typing: Any, data: Any, at: Any) -> Any:
    """32 signed bytes from byte `at` on, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, ir.VectorType(_I8, LANES).as_pointer()))
        loaded.align = 1
        return builder.sitofp(builder.sext(loaded, ir.VectorType(_I32, LANES)), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def load_half(typing: Any, data: Any, at: Any) -> Any:
    """The float16 at byte `at`, as a float."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, _F16.as_pointer()))
        loaded.align = 1
        return builder.fpext(loaded, _F32)

    return types.float32(data, types.int64), generate


@intrinsic
def scale(typing: Any, factor: Any, a: Any) -> Any:
    """`factor * a`, the factor a single float."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(_splat(builder, args[0]), args[1])

    return vector(types.float32, vector), generate


@intrinsic
def fma_scaled(typing: Any, sum_: Any, factor: Any, a: Any, b: Any) -> Any:
    """`sum + factor * (a * b)`, the outer product and sum rounded once; the factor is a single float."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, factor, a, b = args
        return _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [_splat(builder, factor), builder.fmul(a, b), total])

    return vector(vector, types.float32, vector, vector), generate


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """`a + b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), generate


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all lanes, halves added to halves: the order is the same whatever the registers' width."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        width = LANES
        while width > 1:
            width //= 2
            low, high = (
                ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))) for first in (0, width)
            )
            undefined = ir.Constant(value.type, ir.Undefined)
            value = builder.fadd(
                builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high)
            )
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(vector), generate


@intrinsic
def prefetch(typing: Any, data: Any, at: Any) -> Any:
    """Ask for the cache line of byte `at`; it may lie behind the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(_address(context, builder, signature.args[0], *args), _I8.as_pointer())
        hints = [ir.Constant(_I32, n) for n in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])
        return context.get_dummy_value()

    return types.void(data, types.int64), generate
