"""Bit fields of blocks: scales and quants whose bits are stored in several places.

A field is described lane by lane: which byte, how far its bits are shifted right, the mask that remains, and how far
they are shifted left. LLVM makes of it a shuffle of bytes and shifts of whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.layout import LANES
from ..build.vectors import element_address, everywhere, register_lanes, vector
from .quants import lanes

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)


class Field(NamedTuple):
    """Bits of bytes: in each of 16 lanes `(byte[place] >> shift & mask) << left`."""

    places: Sequence[int]
    shifts: Sequence[int]
    mask: int
    left: int = 0


def _loaded(context: Any, builder: Any, kind: Any, what: Any, array: Any, at: Any) -> Any:
    address = element_address(context, builder, kind, array, at)
    loaded = builder.load(builder.bitcast(address, what.as_pointer()))
    loaded.align = 1
    return loaded


def load_fields(n_bytes: int, offset: int, *fields: Field) -> Any:
    """Make the function that loads `n_bytes` bytes and returns the union of `fields`, plus `offset`, as 16 floats."""

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            packed = _loaded(context, builder, signature.args[0], ir.VectorType(_I8, n_bytes), *args)
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
    """Return 16 in the lanes whose bit of an i16 is 1, else 0."""
    sixteen = ir.Constant(_INTS, [16] * LANES)
    if register_lanes() == LANES:  # the bits are a mask register
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(mask, sixteen, ir.Constant(_INTS, None))
    shifted = everywhere(builder, builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 4)))
    return builder.and_(builder.lshr(shifted, ir.Constant(_INTS, list(range(LANES)))), sixteen)


@intrinsic
def load_5_bits(typing: Any, data: Any, low: Any, high: Any) -> Any:
    """Return 32 quants of 5 bits as floats, in two vectors.

    The low 4 bits are in the halves of 16 bytes from byte `low` on, those of the first 16 quants in the low halves. The
    fifth bits are the 32 bits from byte `high` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, low, high = args
        kind = signature.args[0]
        words = builder.zext(_loaded(context, builder, kind, ir.VectorType(_I8, LANES), data, low), _INTS)
        fifth = _loaded(context, builder, kind, ir.VectorType(_I16, 2), data, high)
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
    """Return 2 ** (e - 128) in every lane, for the byte e at `at`; it is subnormal for e of 0 and 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = builder.load(element_address(context, builder, signature.args[0], *args))
        e = builder.zext(byte, _I32)
        normal = builder.shl(builder.sub(e, ir.Constant(_I32, 1)), ir.Constant(_I32, 23))
        subnormal = builder.shl(ir.Constant(_I32, 1 << 21), builder.and_(e, ir.Constant(_I32, 1)))
        bits = builder.select(builder.icmp_unsigned("<", e, ir.Constant(_I32, 2)), subnormal, normal)
        return builder.bitcast(everywhere(builder, bits), _VECTOR)

    return vector(data, types.int64), generate
