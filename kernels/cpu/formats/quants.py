"""Unpack quants of 4 and 6 bits: bit operations on vectors of 16 32-bit words, and conversion to floats."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from ..build.layout import LANES
from ..build.vectors import call_llvm, element_address, everywhere, register_lanes, vector

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class _Words(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name=f"uint32x{LANES}")


lanes = _Words()


@register_model(_Words)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _INTS)


def _load(context: Any, builder: Any, kind: Any, what: Any, array: Any, at: Any) -> Any:
    address = element_address(context, builder, kind, array, at)
    loaded = builder.load(builder.bitcast(address, what.as_pointer()))
    loaded.align = 1
    return loaded


def _shuffled(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _side_by_side(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        every = list(range(2 * parts[0].type.count))
        parts = [_shuffled(builder, a, b, every) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def load_words(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 words from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, signature.args[0], _INTS, *args)

    return lanes(data, types.int64), generate


@intrinsic
def load_words_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Load 4 words from each of four byte offsets on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = ir.VectorType(_I32, 4)
        parts = [_load(context, builder, signature.args[0], four, args[0], at) for at in args[1:]]
        return _side_by_side(builder, parts)

    return lanes(data, *[types.int64] * 4), generate


@intrinsic
def load_halves_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Load the float16 at each of four byte offsets, into 4 lanes each, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = [_load(context, builder, signature.args[0], _I16, args[0], at) for at in args[1:]]
        joined = _side_by_side(builder, [everywhere(builder, half, 4) for half in halves])
        return builder.fpext(builder.bitcast(joined, ir.VectorType(_F16, LANES)), _VECTOR)

    return vector(data, *[types.int64] * 4), generate


@intrinsic
def load_uint8(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 bytes from byte `at` on, one per word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(_load(context, builder, signature.args[0], ir.VectorType(_I8, LANES), *args), _INTS)

    return lanes(data, types.int64), generate


@intrinsic
def load_scales_of_6(typing: Any, data: Any, at: Any) -> Any:
    """Load the scales and minima that Q4_K packs into 12 bytes: 4 scales, 4 minima, 4 scales, 4 minima.

    The first four of each have 6 bits of a byte. The last four have their low 4 bits in the third 4 bytes, and their
    high 2 bits above those of the first four.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = _load(context, builder, signature.args[0], ir.VectorType(_I8, 12), *args)

        def bits(places: list[int], shifts: list[int], masks: list[int]) -> Any:
            """Return in each lane some bits of one of the 12 bytes."""
            words = builder.zext(_shuffled(builder, packed, packed, places), _INTS)
            return builder.and_(builder.lshr(words, ir.Constant(_INTS, shifts)), ir.Constant(_INTS, masks))

        scales, minima, both = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
        low = bits([*scales, *minima, *both, *both], [0] * 12 + [4] * 4, [63] * 8 + [15] * 8)
        high = bits([*scales, *minima, *scales, *minima], [0] * 8 + [2] * 8, [0] * 8 + [48] * 8)
        return builder.sitofp(builder.or_(low, high), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def scale_4_bits(typing: Any, words: Any, scale: Any, minimum: Any) -> Any:
    """`scale * q - minimum`, rounded once, for the quant q in the lowest 4 bits of each word.

    All lanes of `scale` are equal, and so are all lanes of `minimum`. With AVX-512 q is an index into a register of all
    16 results, which is computed once per scale.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, scale, minimum = args
        name, less = f"llvm.fma.v{LANES}f32", builder.fneg(minimum)
        if register_lanes() == LANES:
            every = ir.Constant(_VECTOR, [float(q) for q in range(LANES)])
            table = call_llvm(builder, name, _VECTOR, [scale, every, less])
            return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [table, words])
        quants = builder.sitofp(builder.and_(words, everywhere(builder, ir.Constant(_I32, 15))), _VECTOR)
        return call_llvm(builder, name, _VECTOR, [scale, quants, less])

    return vector(lanes, vector, vector), generate


@intrinsic
def both(typing: Any, words: Any, mask: Any) -> Any:
    """Return `words & mask`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def either(typing: Any, a: Any, b: Any) -> Any:
    """Return `a | b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(*args)

    return lanes(lanes, lanes), generate


@intrinsic
def left(typing: Any, words: Any, n: Any) -> Any:
    """Return `words << n`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shl(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def right(typing: Any, words: Any, n: Any) -> Any:
    """Return `words >> n`, unsigned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def second_right_2(typing: Any, words: Any) -> Any:
    """Return the first 8 words unchanged, and the last 8 shifted right by 2 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], ir.Constant(_INTS, [0] * (LANES // 2) + [2] * (LANES // 2)))

    return lanes(lanes), generate


@intrinsic
def bytes_minus(typing: Any, words: Any, n: Any) -> Any:
    """Subtract n from each byte of 16 words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_I8, 4 * LANES)
        less = everywhere(builder, builder.trunc(args[1], _I8), 4 * LANES)
        return builder.bitcast(builder.sub(builder.bitcast(args[0], kind), less), _INTS)

    return lanes(lanes, types.int64), generate


@intrinsic(prefer_literal=True)
def floats_of_bytes(typing: Any, words: Any, part: Any) -> Any:
    """Return signed bytes 16 `part` to 16 `part` + 15 of 16 words as floats; `part` must be a literal."""
    if not isinstance(part, types.IntegerLiteral):
        return None
    first = LANES * part.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.bitcast(args[0], ir.VectorType(_I8, 4 * LANES))
        some = _shuffled(builder, whole, whole, list(range(first, first + LANES)))
        return builder.sitofp(builder.sext(some, _INTS), _VECTOR)

    return vector(lanes, part), generate
