"""SIMD vectors of 16 floats for kernels in Numba: operations of LLVM that Numba does not offer by itself.

LLVM splits a vector into the processor's registers: one of AVX-512, two of AVX2, four of NEON. The order of summation
is the same for all three. Arguments named `at` are byte offsets in byte arrays and indices in float arrays; bounds are
not checked. Vectors are float32; `add`, `sub`, `mul`, `larger` and `total` also take the float64 vectors of
`sum_exp.py`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from .layout import LANES
from .library import TILES

_F16, _F32, _I8, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


# Probes: functions in LLVM IR, whose machine code shows which instructions the processor has.
_PROBE = "define <16 x float> @twice(<16 x float> %a) {\n  %b = fadd <16 x float> %a, %a\n  ret <16 x float> %b\n}"
_REVERSED = ", ".join(f"i32 {63 - i}" for i in range(64))
_PROBE_OF_BYTES = (
    "define <64 x i8> @reverse(<64 x i8> %a) {\n"
    f"  %b = shufflevector <64 x i8> %a, <64 x i8> undef, <64 x i32> <{_REVERSED}>\n  ret <64 x i8> %b\n}}"
)


@cache
def register_lanes() -> int:
    """Return how many float32 fit in a SIMD register of the processor that Numba compiles for: 16, 8 or 4."""
    text = cpu_target.target_context.codegen()._tm.emit_assembly(binding.parse_assembly(_PROBE))
    return 16 if "zmm" in text else 8 if "ymm" in text else 4


@cache
def has_multishift() -> bool:
    """Return whether the processor that Numba compiles for has the instruction vpmultishiftqb of AVX-512 VBMI.

    The probe reverses 64 bytes. With AVX-512 VBMI, LLVM compiles it to vpermb, another instruction of this set.
    """
    text = cpu_target.target_context.codegen()._tm.emit_assembly(binding.parse_assembly(_PROBE_OF_BYTES))
    return "vpermb" in text


_EVEN, _ODD = (", ".join(f"i32 {2 * i + odd}" for i in range(LANES)) for odd in range(2))
_PROBE_OF_PAIRS = f"""define <16 x i32> @add_pairs(<16 x i32> %sum, <32 x i16> %a, <32 x i16> %b) {{
  %x = sext <32 x i16> %a to <32 x i32>
  %y = sext <32 x i16> %b to <32 x i32>
  %products = mul <32 x i32> %x, %y
  %even = shufflevector <32 x i32> %products, <32 x i32> undef, <16 x i32> <{_EVEN}>
  %odd = shufflevector <32 x i32> %products, <32 x i32> undef, <16 x i32> <{_ODD}>
  %pairs = add <16 x i32> %even, %odd
  %added = add <16 x i32> %sum, %pairs
  ret <16 x i32> %added
}}"""
_PROBE_OF_QUADS = """declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}"""
_PAIR_DOT = re.compile(r"((?:{vex}\s+)?vpdpwssd|vpmaddwd)\s.*%([yz])mm")


@cache
def pair_dot() -> str:
    """Return the mnemonic of the instruction that multiplies int16 numbers and adds adjacent products in pairs.

    It is vpdpwssd (perhaps with the prefix {vex}), which also adds each pair to a sum, or vpmaddwd, which does not.
    Return "" if LLVM compiles the probe to neither, or does not use the widest registers.
    """
    text = cpu_target.target_context.codegen()._tm.emit_assembly(binding.parse_assembly(_PROBE_OF_PAIRS))
    found = _PAIR_DOT.search(text)
    is_widest = found is not None and {"y": 8, "z": 16}[found[2]] == register_lanes()
    return " ".join(found[1].split()) if found is not None and is_widest else ""


@cache
def has_quad_dot() -> bool:
    """Return whether the processor that Numba compiles for has sdot, which adds four products of int8 to each sum."""
    text = cpu_target.target_context.codegen()._tm.emit_assembly(binding.parse_assembly(_PROBE_OF_QUADS))
    return "sdot" in text


@cache
def has_tiles() -> bool:
    """Return whether the processor that Numba compiles for has AMX (tiles of bytes), and the system permits AMX."""
    return TILES in cpu_target.target_context.codegen()._tm_features


# When rows are expanded for register tiles (`tile.py`), a row is stored in 16 / PART parts: the first part has the
# first PART columns of every 16 columns, the second part the next PART columns of every 16. With AVX2, PART is 8, the
# number of columns in a register. Otherwise PART is 16. On NEON, whose registers hold 4 columns, it is not 4, because
# the loop in `tile.py` makes two steps of 16 columns per iteration: LLVM would load the columns of both steps at once,
# and no registers would be left for sums.
PART = 8 if register_lanes() == 8 else LANES


class Vector(types.Type):  # type: ignore[misc]
    """The Numba type of a vector: `scalar` is Numba's type of an element, `llvm` LLVM's type of the vector."""

    def __init__(self, scalar: Any, llvm: Any) -> None:
        super().__init__(name=f"{scalar}x{llvm.count}")
        self.scalar, self.llvm = scalar, llvm


vector = Vector(types.float32, _VECTOR)


@register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.llvm)


def element_address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return the address of element `at` of an array whose Numba type is `kind`."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def load_as(context: Any, builder: Any, signature: Any, args: Any, kind: Any, align: int = 1) -> Any:
    """Load a value of LLVM's type `kind` from an array; the array and the index are the first two of `args`."""
    address = element_address(context, builder, signature.args[0], *args[:2])
    loaded = builder.load(builder.bitcast(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def everywhere(builder: Any, scalar: Any, n: int = LANES) -> Any:
    """Return a vector with the scalar in each of n lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, n), [0] * n))


def call_llvm(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def zeros(typing: Any) -> Any:
    """Return a vector of zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, None)

    return vector(), generate


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """Return a vector with the float32 `scalar` in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def get(typing: Any, floats: Any, at: Any) -> Any:
    """Load `floats[at]` without Numba's test for a negative index, which would prevent LLVM from vectorising."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(element_address(context, builder, signature.args[0], *args))

    return types.float32(floats, types.int64), generate


@intrinsic
def put(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Store `value` in `floats[at]`, without the test for a negative index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], element_address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(floats, types.int64, types.float32), generate


@intrinsic
def load(typing: Any, floats: Any, at: Any) -> Any:
    """Load 16 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_as(context, builder, signature, args, _VECTOR, align=4)

    return vector(floats, types.int64), generate


@intrinsic
def load_floats(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 floats from an array of bytes, from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_as(context, builder, signature, args, _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def load_splat(typing: Any, floats: Any, at: Any) -> Any:
    """Load element `at` into every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return everywhere(builder, builder.load(element_address(context, builder, signature.args[0], *args)))

    return vector(floats, types.int64), generate


@intrinsic
def load_half_splat(typing: Any, data: Any, at: Any) -> Any:
    """Load the float16 at byte `at` into every lane as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The float16 is copied to all lanes before the conversion, because processors convert whole vectors.
        half = load_as(context, builder, signature, args, _I16)
        return builder.fpext(builder.bitcast(everywhere(builder, half), ir.VectorType(_F16, LANES)), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def load_half_bits(typing: Any, data: Any, at: Any) -> Any:
    """Load the 16 bits at byte `at` as an int64 from 0 to 65,535, to index a table."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(load_as(context, builder, signature, args, _I16), ir.IntType(64))

    return types.int64(data, types.int64), generate


@intrinsic
def load_int8(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 signed bytes from byte `at` on, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = load_as(context, builder, signature, args, ir.VectorType(_I8, LANES))
        return builder.sitofp(builder.sext(loaded, _INTS), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def store(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Store 16 floats from element `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args[:2])
        builder.store(args[2], builder.bitcast(address, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(floats, types.int64, vector), generate


@intrinsic
def stream(typing: Any, floats: Any, at: Any, value: Any) -> Any:
    """Store 16 floats at a multiple of 64 bytes, without first reading the cache line; for data that is not read soon.

    Only `fence` orders these stores before later stores.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature.args[0], *args[:2])
        made = builder.store(args[2], builder.bitcast(address, _VECTOR.as_pointer()))
        made.align = 4 * LANES
        made.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(floats, types.int64, vector), generate


@intrinsic
def fence(typing: Any) -> Any:
    """Order all earlier stores, also those of `stream`, before all later stores."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def store_parts(typing: Any, floats: Any, at: Any, apart: Any, value: Any) -> Any:
    """Store 16 floats in parts of PART floats; part j begins at element `at + j * apart`."""

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


def lane_by_lane(operation: str) -> Any:
    """Make the function that applies an operation of LLVM to two vectors of one type."""

    @intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, operation)(*args)

        return a(a, a), generate

    return apply


add, sub, mul, div = map(lane_by_lane, ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c`, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.fma.v{LANES}f32", _VECTOR, list(args))

    return vector(vector, vector, vector), generate


@intrinsic
def fms(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b - c`, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c = args
        return call_llvm(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [a, b, builder.fneg(c)])

    return vector(vector, vector, vector), generate


def _choice(comparison: str) -> Any:
    """Make the function that compares the lanes of a and b; it returns a's lane where the result is true, else b's."""

    @intrinsic
    def choose(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered(comparison, *args), *args)

        return a(a, a), generate

    return choose


# Return the larger (smaller) lane of each pair of lanes. If one of the two is NaN, return the lane of b.
larger, smaller = map(_choice, (">", "<"))


@intrinsic
def between(typing: Any, first: Any, last: Any, a: Any, b: Any) -> Any:
    """Return lanes `first` to `last - 1` of a, and the other lanes of b. `first` and `last` must fit in an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_INTS, list(range(LANES)))
        first, last, a, b = args
        first, last = builder.trunc(first, _I32), builder.trunc(last, _I32)
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, everywhere(builder, first)),
            builder.icmp_signed("<", lanes, everywhere(builder, last)),
        )
        return builder.select(inside, a, b)

    return vector(types.int64, types.int64, vector, vector), generate


def _folded(builder: Any, value: Any, join: Any) -> Any:
    """Reduce all lanes to one by joining halves; the order does not depend on the register width."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))) for first in (0, width))
        undefined = ir.Constant(value.type, ir.Undefined)
        value = join(builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high))
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Return the sum of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], builder.fadd)

    return a.scalar(a), generate


@intrinsic
def largest_lane(typing: Any, a: Any) -> Any:
    """Return the largest lane; no lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(vector), generate


@intrinsic
def prefetch(typing: Any, data: Any, at: Any) -> Any:
    """Prefetch the cache line of byte `at`. The byte may be beyond the end of the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(element_address(context, builder, signature.args[0], *args), _I8.as_pointer())
        hints = [ir.Constant(_I32, n) for n in (0, 3, 1)]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])
        return context.get_dummy_value()

    return types.void(data, types.int64), generate


# ---- totals of lanes ----

# The lanes of a vector are summed by adding its halves repeatedly. Several vectors are summed together, so that no lane
# is idle.


def lanes(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Return a vector of the lanes whose indices in the concatenation of a and b are `places`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _two(builder: Any, a: Any, b: Any, distance: int) -> Any:
    """Add lanes that are `distance` apart, in a and in b separately; return all sums in one vector.

    The sums of b are in the lanes whose number has the bit `distance` set, the sums of a in the other lanes.
    """
    n = a.type.count
    stay = [lane if not lane & distance else n + lane for lane in range(n)]
    move = [lane + distance if not lane & distance else n + lane - distance for lane in range(n)]
    return builder.fadd(lanes(builder, a, b, stay), lanes(builder, a, b, move))


def _one(builder: Any, a: Any, distance: int) -> Any:
    """Add lanes that are `distance` apart; return a vector with half as many lanes."""
    low = [lane for lane in range(a.type.count) if not lane & distance]
    return builder.fadd(lanes(builder, a, a, low), lanes(builder, a, a, [lane + distance for lane in low]))


def fold(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector of the totals of 1, 2, 4, ... vectors. Each total is summed in the same order as by `total`."""
    distance = vectors[0].type.count
    while distance > 1:
        distance //= 2
        half = len(vectors) // 2
        if half:
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [_two(builder, a, b, distance) for a, b in pairs]
        else:
            vectors = [_one(builder, vectors[0], distance)]
    return vectors[0]


def fold_all(builder: Any, vectors: list[Any]) -> list[Any]:
    """Return the totals of any number of vectors, as a list of scalars."""
    totals: list[Any] = []
    while vectors:
        n = next(n for n in (16, 8, 4, 2, 1) if n <= min(len(vectors), vectors[0].type.count))
        folded = fold(builder, vectors[:n])
        totals += [builder.extract_element(folded, ir.Constant(_I32, i)) for i in range(n)]
        vectors = vectors[n:]
    return totals
