"""Unpack quants of 2 to 6 bits, and 4-bit indices into tables (MXFP4, IQ4), to float32.

Most functions take or return a vector of 16 words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ..build.layout import LANES
from ..build.vectors import (
    Vector,
    call_llvm,
    element_address,
    everywhere,
    lane_by_lane,
    load_as,
    register_lanes,
    vector,
)
from ..build.vectors import lanes as shuffled

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


# The type of a vector of 16 words.
lanes = Vector(types.uint32, _INTS)


def side_by_side(builder: Any, parts: list[Any]) -> Any:
    """Concatenate 1, 2, 4, ... vectors of one type."""
    while len(parts) > 1:
        every = list(range(2 * parts[0].type.count))
        parts = [shuffled(builder, a, b, every) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def load_words(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 words from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_as(context, builder, signature, args, _INTS)

    return lanes(data, types.int64), generate


@intrinsic
def load_words_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Load 4 words from each of four byte offsets."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = ir.VectorType(_I32, 4)
        parts = [load_as(context, builder, signature, (args[0], at), four) for at in args[1:]]
        return side_by_side(builder, parts)

    return lanes(data, *[types.int64] * 4), generate


@intrinsic
def load_halves_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Load a float16 from each of four byte offsets, and repeat each of them in 4 lanes, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = [load_as(context, builder, signature, (args[0], at), _I16) for at in args[1:]]
        joined = side_by_side(builder, [everywhere(builder, half, 4) for half in halves])
        return builder.fpext(builder.bitcast(joined, ir.VectorType(_F16, LANES)), _VECTOR)

    return vector(data, *[types.int64] * 4), generate


@intrinsic
def load_uint8(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 bytes from byte `at` on, and extend each to a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(load_as(context, builder, signature, args, ir.VectorType(_I8, LANES)), _INTS)

    return lanes(data, types.int64), generate


@intrinsic
def load_scales_of_6(typing: Any, data: Any, at: Any) -> Any:
    """Load the 8 scales s and 8 minima m of 6 bits from the 12 bytes of a Q4_K or Q5_K block, as floats.

    The lanes of the result are s0 to s3, m0 to m3, s4 to s7, m4 to m7. Bytes 0 to 3 have s0 to s3 in their low 6 bits,
    and the high 2 bits of s4 to s7 in their high 2 bits; bytes 4 to 7 likewise have the minima. Bytes 8 to 11 have the
    low 4 bits of s4 to s7 in their low four bits, and those of m4 to m7 in their high four bits.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = load_as(context, builder, signature, args, ir.VectorType(_I8, 12))

        def bits(places: list[int], shifts: list[int], masks: list[int]) -> Any:
            """Return, in each lane, `byte[place] >> shift & mask` of the 12 bytes."""
            words = builder.zext(shuffled(builder, packed, packed, places), _INTS)
            return builder.and_(builder.lshr(words, ir.Constant(_INTS, shifts)), ir.Constant(_INTS, masks))

        scales, minima, both = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
        low = bits([*scales, *minima, *both, *both], [0] * 12 + [4] * 4, [63] * 8 + [15] * 8)
        high = bits([*scales, *minima, *scales, *minima], [0] * 8 + [2] * 8, [0] * 8 + [48] * 8)
        return builder.sitofp(builder.or_(low, high), _VECTOR)

    return vector(data, types.int64), generate


def fma_of_4_bits(builder: Any, words: Any, scale: Any, offset: Any) -> Any:
    """Return `scale * q + offset`, rounded once, for the quant q in the lowest 4 bits of each word.

    All lanes of `scale` are equal, and so are all lanes of `offset`. With AVX-512 the results for all 16 values of q
    are computed once per scale, in one register, and q is an index into this register.
    """
    name = f"llvm.fma.v{LANES}f32"
    if register_lanes() == LANES:
        every = ir.Constant(_VECTOR, [float(q) for q in range(LANES)])
        table = call_llvm(builder, name, _VECTOR, [scale, every, offset])
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [table, words])
    quants = builder.sitofp(builder.and_(words, ir.Constant(_INTS, [15] * LANES)), _VECTOR)
    return call_llvm(builder, name, _VECTOR, [scale, quants, offset])


@intrinsic
def scale_4_bits(typing: Any, words: Any, scale: Any, minimum: Any) -> Any:
    """Return `scale * q - minimum` for quants q of 4 bits (`fma_of_4_bits`)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, scale, minimum = args
        return fma_of_4_bits(builder, words, scale, builder.fneg(minimum))

    return vector(lanes, vector, vector), generate


def _with_number(operation: str) -> Any:
    """Make a function of 8 or 16 words and a number, which applies an LLVM operation to each word and the number."""

    @intrinsic
    def apply(typing: Any, words: Any, n: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = everywhere(builder, builder.trunc(args[1], _I32), args[0].type.count)
            return getattr(builder, operation)(args[0], number)

        return words(words, types.int64), generate

    return apply


# `words & n`, `words << n`, and `words >> n`, unsigned.
both, left, right = map(_with_number, ("and_", "shl", "lshr"))
# `a | b`.
either = lane_by_lane("or_")


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
    """Return 16 of the 64 signed bytes in 16 words, from byte `16 * part` on, as floats; `part` must be a literal."""
    if not isinstance(part, types.IntegerLiteral):
        return None
    first = LANES * part.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.bitcast(args[0], ir.VectorType(_I8, 4 * LANES))
        some = shuffled(builder, whole, whole, list(range(first, first + LANES)))
        return builder.sitofp(builder.sext(some, _INTS), _VECTOR)

    return vector(lanes, part), generate


# ---- bit fields ----


class Field(NamedTuple):
    """Some of the bits of 16 scales.

    Lane i has the value `(bytes[places[i]] >> shifts[i] & mask) << left`. `load_fields` loads the bytes.
    """

    places: Sequence[int]
    shifts: Sequence[int]
    mask: int
    left: int = 0


def load_fields(n_bytes: int, offset: int, *fields: Field) -> Any:
    """Make the function that loads `n_bytes` bytes, and returns 16 floats: the ored fields, plus `offset`."""

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            packed = load_as(context, builder, signature, args, ir.VectorType(_I8, n_bytes))
            found = ir.Constant(_INTS, [0] * LANES)
            for field in fields:
                places = ir.Constant(ir.VectorType(_I32, LANES), list(field.places))
                words = builder.zext(builder.shuffle_vector(packed, packed, places), _INTS)
                bits = builder.and_(
                    builder.lshr(words, ir.Constant(_INTS, list(field.shifts))),
                    ir.Constant(_INTS, [field.mask] * LANES),
                )
                found = builder.or_(found, builder.shl(bits, ir.Constant(_INTS, [field.left] * LANES)))
            return builder.sitofp(builder.add(found, ir.Constant(_INTS, [offset] * LANES)), _VECTOR)

        return vector(data, types.int64), generate

    return load


def _spread(builder: Any, bits: Any) -> Any:
    """Return 16 words. Word i is 16 if bit i of the int16 `bits` is set, else 0."""
    sixteen = ir.Constant(_INTS, [16] * LANES)
    if register_lanes() == LANES:  # AVX-512: the bits become a mask register
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(mask, sixteen, ir.Constant(_INTS, None))
    shifted = everywhere(builder, builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 4)))
    return builder.and_(builder.lshr(shifted, ir.Constant(_INTS, list(range(LANES)))), sixteen)


@intrinsic
def load_5_bits(typing: Any, data: Any, low: Any, high: Any) -> Any:
    """Return 32 quants of 5 bits as floats, in two vectors.

    The low 4 bits are in 16 bytes from byte `low` on. The low four bits of these bytes belong to the first 16 quants,
    the high four bits to the last 16. The fifth bits are the 32 bits from byte `high` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, low, high = args
        words = builder.zext(load_as(context, builder, signature, (data, low), ir.VectorType(_I8, LANES)), _INTS)
        fifth = load_as(context, builder, signature, (data, high), ir.VectorType(_I16, 2))
        found = []
        for half in range(2):
            bits = builder.extract_element(fifth, ir.Constant(_I32, half))
            quants = builder.and_(
                builder.lshr(words, ir.Constant(_INTS, [4 * half] * LANES)), ir.Constant(_INTS, [15] * LANES)
            )
            found.append(builder.sitofp(builder.or_(quants, _spread(builder, bits)), _VECTOR))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(vector, 2)(data, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def second_right(typing: Any, words: Any, n: Any) -> Any:
    """Return the first 8 words unchanged, and the last 8 shifted right by n bits; n must be a literal."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    shifts = [0] * (LANES // 2) + [n.literal_value] * (LANES // 2)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], ir.Constant(_INTS, shifts))

    return lanes(lanes, n), generate


@intrinsic
def load_half_power(typing: Any, data: Any, at: Any) -> Any:
    """Return 2 ** (e - 128) in every lane, for the byte e at `at`. For e of 0 and 1 the result is subnormal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = builder.load(element_address(context, builder, signature.args[0], *args))
        e = builder.zext(byte, _I32)
        normal = builder.shl(builder.sub(e, ir.Constant(_I32, 1)), ir.Constant(_I32, 23))
        subnormal = builder.shl(ir.Constant(_I32, 1 << 21), builder.and_(e, ir.Constant(_I32, 1)))
        bits = builder.select(builder.icmp_unsigned("<", e, ir.Constant(_I32, 2)), subnormal, normal)
        return builder.bitcast(everywhere(builder, bits), _VECTOR)

    return vector(data, types.int64), generate


# ---- quants that are indices into a table of 16 levels ----

_BYTES = ir.VectorType(_I8, LANES)


def look_up(builder: Any, levels: Sequence[int], quants: Any) -> Any:
    """Return `levels[quant]` for each of 16 quants. Levels and quants are bytes."""
    table = ir.Constant(_BYTES, [level & 255 for level in levels])
    is_x86 = binding.get_process_triple().startswith("x86_64")
    name = "llvm.x86.ssse3.pshuf.b.128" if is_x86 else "llvm.aarch64.neon.tbl1.v16i8"
    return call_llvm(builder, name, _BYTES, [table, quants])


def load_levels(levels: Sequence[int]) -> Any:
    """Make a function that loads 32 quants of 4 bits and returns `scale * levels[quant]`, in two vectors.

    The 16 bytes from byte `at` on have the first 16 quants in their low four bits, and the last 16 in their high four
    bits. Levels are signed bytes. With AVX-512, one register has the products of the scale with all 16 levels, and a
    quant is an index into this register.
    """

    @intrinsic
    def load(typing: Any, data: Any, at: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded, scale = load_as(context, builder, signature, args, _BYTES), args[2]
            if register_lanes() == LANES:
                words = builder.zext(loaded, _INTS)
                table = builder.fmul(scale, ir.Constant(_VECTOR, [float(level) for level in levels]))
                halves = [words, builder.lshr(words, ir.Constant(_INTS, [4] * LANES))]
                name = "llvm.x86.avx512.permvar.sf.512"
                found = [call_llvm(builder, name, _VECTOR, [table, half]) for half in halves]
            else:
                low = builder.and_(loaded, ir.Constant(_BYTES, [15] * LANES))
                high = builder.lshr(loaded, ir.Constant(_BYTES, [4] * LANES))
                looked = [builder.sext(look_up(builder, levels, half), _INTS) for half in (low, high)]
                found = [builder.fmul(scale, builder.sitofp(one, _VECTOR)) for one in looked]
            return context.make_tuple(builder, signature.return_type, found)

        return types.UniTuple(vector, 2)(data, types.int64, vector), generate

    return load
