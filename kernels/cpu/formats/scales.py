"""Load scales and offsets for products in fixed point: those of one block in each of 8 rows, one lane per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.memory import raw
from ..build.vectors import Vector, vector

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
# Number of rows whose scales are loaded together.
ROWS = 8
_SUMS, _FLOATS, _WORDS = (ir.VectorType(kind, ROWS) for kind in (_I32, _F32, _I16))


floats_8 = Vector(types.float32, _FLOATS)


def load_at(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Load a value of type `kind`, `offset` bytes after an address."""
    place = builder.add(address, ir.Constant(_I64, offset))
    loaded = builder.load(builder.inttoptr(place, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _gathered(builder: Any, addresses: list[Any], offset: int, kind: Any) -> Any:
    """Load a value of type `kind`, `offset` bytes after each address, into a vector."""
    found = ir.Constant(ir.VectorType(kind, ROWS), ir.Undefined)
    for r, address in enumerate(addresses):
        found = builder.insert_element(found, load_at(builder, address, offset, kind), ir.Constant(_I32, r))
    return found


def gathered_halves(builder: Any, addresses: list[Any], offset: int) -> Any:
    """Load a float16, `offset` bytes after each of 8 addresses; return them as a vector of float32.

    The 8 float16 are joined by integer instructions, because the vector units are busy with products.
    """
    pair = ir.Constant(ir.VectorType(_I64, 2), ir.Undefined)
    for i in range(2):
        word = builder.zext(load_at(builder, addresses[4 * i], offset, _I16), _I64)
        for r in range(1, 4):
            half = builder.zext(load_at(builder, addresses[4 * i + r], offset, _I16), _I64)
            word = builder.or_(word, builder.shl(half, ir.Constant(_I64, 16 * r)))
        pair = builder.insert_element(pair, word, ir.Constant(_I32, i))
    return builder.fpext(builder.bitcast(pair, ir.VectorType(_F16, ROWS)), _FLOATS)


def both_halves(builder: Any, words: Any, kind: str) -> list[Any]:
    """Return two float32 vectors: the first and the second float16 or bfloat16 of each of 8 words."""
    sixteen = ir.Constant(_SUMS, [16] * ROWS)
    if kind == "bf16":
        upper = builder.and_(words, ir.Constant(_SUMS, [0xFFFF0000] * ROWS))
        return [builder.bitcast(found, _FLOATS) for found in (builder.shl(words, sixteen), upper)]
    found = [builder.trunc(words, _WORDS), builder.trunc(builder.lshr(words, sixteen), _WORDS)]
    return [builder.fpext(builder.bitcast(one, ir.VectorType(_F16, ROWS)), _FLOATS) for one in found]


class Scales(NamedTuple):
    """How the scales and offsets of blocks are loaded; a weight is `scale * quant + offset`.

    Attributes:
        gather: function that returns the scales and the offsets of the blocks at 8 addresses. If a format has no
            offsets, the scales are returned twice.
        words: 1 if a block begins with a float16 scale, 2 if it begins with a scale and an offset in float16, else 0.
    """

    gather: Any
    words: int = 0


def scales_of(kind: str, *, has_offset: bool) -> Scales:
    """Return the `Scales` of a format whose blocks begin with a scale, or with a scale and an offset.

    `kind` is the type of the scale and the offset: "f16", "bf16" or "f32". A format without offsets must have "f16".
    """

    @intrinsic
    def gather(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if not has_offset:
                found = [gathered_halves(builder, list(args), 0)] * 2
            elif kind == "f32":
                found = [_gathered(builder, list(args), offset, _F32) for offset in (0, 4)]
            else:
                found = both_halves(builder, _gathered(builder, list(args), 0, _I32), kind)
            return context.make_tuple(builder, signature.return_type, found)

        return types.UniTuple(floats_8, 2)(*[types.int64] * ROWS), generate

    return Scales(gather, 1 + has_offset if kind == "f16" else 0)


@intrinsic
def first(typing: Any, a: Any) -> Any:
    """Return the first lane of a vector of floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float32(vector), generate


@intrinsic
def _joined(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Return 8 floats as a vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = ir.Constant(_FLOATS, ir.Undefined)
        for r, value in enumerate(args):
            found = builder.insert_element(found, value, ir.Constant(_I32, r))
        return found

    return floats_8(*[types.float32] * ROWS), generate


def scales_one_by_one(scale_of: Callable[..., Any]) -> Scales:
    """Return the `Scales` of a format without offsets; `scale_of(data, at)` loads one into every lane."""

    @jit
    def gather(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> Any:
        scales = _joined(
            first(scale_of(raw(a), 0)), first(scale_of(raw(b), 0)), first(scale_of(raw(c), 0)),
            first(scale_of(raw(d), 0)), first(scale_of(raw(e), 0)), first(scale_of(raw(f), 0)),
            first(scale_of(raw(g), 0)), first(scale_of(raw(h), 0)),
        )  # fmt: skip
        return scales, scales

    return Scales(gather)
