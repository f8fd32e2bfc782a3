"""Codes of 4 and 6 bits as floats: 32-bit words are cut where they lie, many codes to the word.

A code that is cut out with a mask stays where it was: code j of a word comes out as `code * 2**(its place)`, which
a float holds exactly. The vector that it is multiplied with was divided by the same power of two (`arranged.py`), so
nothing is shifted: a mask and a conversion per 16 codes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from kernels.cpu.layout import LANES
from kernels.cpu.vectors import element_address, everywhere, vector

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
    """16 words from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, signature.args[0], _INTS, *args)

    return lanes(data, types.int64), generate


@intrinsic
def load_words_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """4 words from each of four bytes on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = ir.VectorType(_I32, 4)
        parts = [_load(context, builder, signature.args[0], four, args[0], at) for at in args[1:]]
        return _side_by_side(builder, parts)

    return lanes(data, *[types.int64] * 4), generate


@intrinsic
def load_halves_of_4(typing: Any, data: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The float16 at each of four bytes, in 4 lanes each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = [_load(context, builder, signature.args[0], _I16, args[0], at) for at in args[1:]]
        joined = _side_by_side(builder, [everywhere(builder, half, 4) for half in halves])
        return builder.fpext(builder.bitcast(joined, ir.VectorType(_F16, LANES)), _VECTOR)

    return vector(data, *[types.int64] * 4), generate


@intrinsic
def load_uint8(typing: Any, data: Any, at: Any) -> Any:
    """16 bytes from byte `at` on, one per word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(_load(context, builder, signature.args[0], ir.VectorType(_I8, LANES), *args), _INTS)

    return lanes(data, types.int64), generate


@intrinsic
def load_scales_of_6(typing: Any, data: Any, at: Any) -> Any:
    """The 8 scales, then the 8 minima, that Q4_K packs into the 12 bytes from `at` on.

    The first four of each are whole; of the last four the low halves lie in the third word, the high two bits above
    the first four.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second, third = (
            _load(context, builder, signature.args[0], _I32, args[0], builder.add(args[1], ir.Constant(_I64, at)))
            for at in (0, 4, 8)
        )

        def cut(word: Any, shift: int, mask: int) -> Any:
            return builder.and_(builder.lshr(word, ir.Constant(_I32, shift)), ir.Constant(_I32, mask))

        words = [
            cut(first, 0, 0x3F3F3F3F), builder.or_(cut(third, 0, 0x0F0F0F0F), cut(first, 2, 0x30303030)),
            cut(second, 0, 0x3F3F3F3F), builder.or_(cut(third, 4, 0x0F0F0F0F), cut(second, 2, 0x30303030)),
        ]  # fmt: skip
        packed: Any = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for i, word in enumerate(words):
            packed = builder.insert_element(packed, word, ir.Constant(_I32, i))
        return builder.sitofp(builder.zext(builder.bitcast(packed, ir.VectorType(_I8, LANES)), _INTS), _VECTOR)

    return vector(data, types.int64), generate


@intrinsic
def cut(typing: Any, words: Any, mask: Any) -> Any:
    """The bits of `mask` of each word, as a float."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, mask = args
        return builder.sitofp(builder.and_(words, everywhere(builder, builder.trunc(mask, _I32))), _VECTOR)

    return vector(lanes, types.int64), generate


@intrinsic
def both(typing: Any, words: Any, mask: Any) -> Any:
    """Words without the bits that are not in `mask`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def either(typing: Any, a: Any, b: Any) -> Any:
    """The bits of both words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(*args)

    return lanes(lanes, lanes), generate


@intrinsic
def left(typing: Any, words: Any, n: Any) -> Any:
    """Words shifted to the left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shl(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def right(typing: Any, words: Any, n: Any) -> Any:
    """Words shifted to the right, zeros from the left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], everywhere(builder, builder.trunc(args[1], _I32)))

    return lanes(lanes, types.int64), generate


@intrinsic
def second_right_2(typing: Any, words: Any) -> Any:
    """The last 8 words shifted to the right by 2 bits, the first 8 as they are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], ir.Constant(_INTS, [0] * (LANES // 2) + [2] * (LANES // 2)))

    return lanes(lanes), generate


@intrinsic(prefer_literal=True)
def spread(typing: Any, a: Any, first: Any, step: Any, times: Any) -> Any:
    """Lanes `first`, `first + step` ... of a, each `times` times; the three must be written as numbers."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in (first, step, times)):
        return None
    places = [first.literal_value + step.literal_value * (lane // times.literal_value) for lane in range(LANES)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _shuffled(builder, args[0], ir.Constant(_VECTOR, ir.Undefined), places)

    return vector(vector, first, step, times), generate


@intrinsic
def lane(typing: Any, a: Any, i: Any) -> Any:
    """Lane `i` of a."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(*args)

    return types.float32(vector, types.int64), generate


@intrinsic
def store_every_4th(typing: Any, floats: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """`floats[at + 16 j ...]` = elements j, j + 4, j + 8 ... of four vectors side by side, for j from 0 to 3."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats, at, *parts = args
        data = context.make_array(signature.args[0])(context, builder, floats).data
        for j in range(4):
            fourths = [_shuffled(builder, part, part, list(range(j, LANES, 4))) for part in parts]
            place = builder.gep(data, [builder.add(at, ir.Constant(at.type, LANES * j))])
            stored = builder.store(_side_by_side(builder, fourths), builder.bitcast(place, _VECTOR.as_pointer()))
            stored.align = 4
        return context.get_dummy_value()

    return types.void(floats, types.int64, vector, vector, vector, vector), generate
