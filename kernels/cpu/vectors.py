"""Vectors of 16 floats for Numba: the few LLVM operations that its compiler would not find by itself.

LLVM cuts a vector into the registers that the processor has: one of AVX-512, two of AVX2, four of NEON; sums are taken
in the same order on all of them. Arguments called `at` count bytes in byte arrays and elements in float arrays;
nothing is checked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from kernels.cpu.layout import LANES

_F16, _F32, _I8, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


_PROBE = "define <16 x float> @twice(<16 x float> %a) {\n  %b = fadd <16 x float> %a, %a\n  ret <16 x float> %b\n}"


@cache
def register_lanes() -> int:
    """Return how many floats a register has, on the processor that Numba compiles for."""
    text = cpu_target.target_context.codegen()._tm.emit_assembly(binding.parse_assembly(_PROBE))
    return 16 if "zmm" in text else 8 if "ymm" in text else 4


# Of each 16 columns of a row that is expanded for tiles so many lie side by side (`tile.py`): those of one of AVX2's
# registers. A register of AVX-512 holds them all; with NEON LLVM would load two steps' columns at once, and have no
# register left for a sum.
PART = 8 if register_lanes() == 8 else LANES


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _Vector()


@register_model(_Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def element_address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where element `at` of an array of this type lies."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def everywhere(builder: Any, scalar: Any, n: int = LANES) -> Any:
    """The scalar in each of n lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, n), [0] * n))


def call_llvm(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def zeros(typing: Any) -> Any:
    """All lanes 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, None)

    return vector(), generate


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """A float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def get(typing: Any, floats: Any, at: Any) -> Any:
    """Element `at`; unlike `floats[at]` it does not ask whether `at` is negative, and loops of it become vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(element_address(context, builder, signature.args[0], *args))

    return types.float32(floats, types.int64), generate


@intrinsic
def put(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Set element `at`, as `get` reads it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], element_address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(floats, types.int64, types.float32), generate


@intrinsic
def load(typing: Any, floats: Any, at: Any) -> Any:
    """16 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
        loaded.align = 4
        return loaded

    return vector(floats, types.int64), generate


@intrinsic
def load_floats(typing: Any, data: Any, at: Any) -> Any:
    """16 floats from byte `at` of an array of bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
        loaded.align = 1
        return loaded

    return vector(data, types.int64), generate


@intrinsic
def load_splat(typing: Any, floats: Any, at: Any) -> Any:
    """Element `at` in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, builder.load(element_address(context, builder, signature.args[0], *args)))

    return vector(floats, types.int64), generate


@intrinsic
def load_half_splat(typing: Any, data: Any, at: Any) -> Any:
    """The float16 at byte `at` in every lane: spread first, for processors widen halves by the vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args)
        half = builder.load(builder.bitcast(address, _I16.as_pointer()))
        half.align = 1
        return builder.fpext(builder.bitcast(everywhere(builder, half), ir.VectorType(_F16, LANES)), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def load_int8(typing: Any, data: Any, at: Any) -> Any:
    """16 signed bytes from byte `at` on, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args)
        loaded = builder.load(builder.bitcast(address, ir.VectorType(_I8, LANES).as_pointer()))
        loaded.align = 1
        return builder.sitofp(builder.sext(loaded, _INTS), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def store(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Write 16 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args[:2])
        builder.store(args[2], builder.bitcast(address, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(floats, types.int64, vector), generate


@intrinsic
def store_parts(typing: Any, floats: Any, at: Any, apart: Any, value: Any) -> Any:
    """Write 16 floats in parts: PART from element `at` on, the next ones `apart` elements behind these."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats, at, apart, value = args
        for first in range(0, LANES, PART):
            places = ir.Constant(ir.VectorType(_I32, PART), list(range(first, first + PART)))
            part = builder.shuffle_vector(value, value, places)
            address = element_address(context, builder, signature.args[0], floats, at)
            builder.store(part, builder.bitcast(address, part.type.as_pointer())).align = 4
            at = builder.add(at, apart)
        return context.get_dummy_value()

    return types.void(floats, types.int64, types.int64, vector), generate


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """`a + b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), generate


@intrinsic
def sub(typing: Any, a: Any, b: Any) -> Any:
    """`a - b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vector(vector, vector), generate


@intrinsic
def mul(typing: Any, a: Any, b: Any) -> Any:
    """`a * b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), generate


@intrinsic
def div(typing: Any, a: Any, b: Any) -> Any:
    """`a / b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.fma.v{LANES}f32", _VECTOR, list(args))

    return vector(vector, vector, vector), generate


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair of lanes; b where one is not a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def smaller(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair of lanes; b where one is not a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def between(typing: Any, first: Any, last: Any, a: Any, b: Any) -> Any:
    """Lanes first to last - 1 of `a`, and those of `b` around them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        first, last, a, b = args
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, everywhere(builder, first)),
            builder.icmp_signed("<", lanes, everywhere(builder, last)),
        )
        return builder.select(inside, a, b)

    return vector(types.int64, types.int64, vector, vector), generate


def _folded(builder: Any, value: Any, join: Any) -> Any:
    """One lane of all, halves joined with halves: the order is the same whatever the registers' width."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))) for first in (0, width))
        undefined = ir.Constant(value.type, ir.Undefined)
        value = join(builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high))
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def largest_lane(typing: Any, a: Any) -> Any:
    """The largest of all lanes, none of which is not a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(vector), generate


@intrinsic
def prefetch(typing: Any, data: Any, at: Any) -> Any:
    """Ask for the cache line of byte `at`; it may lie behind the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(element_address(context, builder, signature.args[0], *args), _I8.as_pointer())
        hints = [ir.Constant(_I32, n) for n in (0, 3, 1)]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])
        return context.get_dummy_value()

    return types.void(data, types.int64), generate
