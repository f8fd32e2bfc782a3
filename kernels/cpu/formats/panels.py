"""Expand weight rows to panels, for gemm in fixed point: quants of ROWS rows as int16 or int8, scales and offsets.

A panel is expanded from stored blocks, at most DEPTH columns at a time, and stays in the L1 cache while the tokens of a
chunk are multiplied with it (`products/fixed_tile.py`). (In gemv, a panel is something else: packed input vectors,
`products/gemv.py`.) A weight is `scale * quant + offset`. The quants of 32 columns of a row take 16 words of 4 bytes.
For each 32 columns, a panel has word 0 of all rows, then word 1 of all rows, ..., then the scales of all rows, then the
offsets of all rows. If the format has a scale for each 16 columns (HALVES), the scales and offsets of the last 16
columns follow those of the first 16.

To build a panel, 8 x 8 words (four quants of one byte each) are transposed, so that a vector has the same 4 columns of
8 rows. From word i of a row, shifts make two words of two int16: columns 4 i and 4 i + 2, and columns 4 i + 1 and
4 i + 3. For sdot, and for AMX if the format has no HALVES, a word keeps its four quants, and only the first 8 of the 16
words of a row are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.memory import floats, raw
from ..build.vectors import Vector, get, has_quad_dot, has_tiles, load_as, put, register_lanes, store
from ..build.vectors import lanes as shuffled
from .quants import lanes, look_up
from .scales import Scales, floats_8

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_EIGHT, _SHORTS, _BYTES = ir.VectorType(_I32, 8), ir.VectorType(_I16, 16), ir.VectorType(_I8, 32)

# Number of rows of a panel. The same word of all rows fills two registers, or four with NEON.
ROWS = 32 if register_lanes() == 16 else 16
# Number of words per row and 32 columns: 16 of quants, and two scales and two offsets.
ROW_WORDS = 20
# If QUADS (for sdot, `fixed_tile.py`), a word has four int8 in place of two int16, in all formats. If TILES (for AMX,
# `fixed_amx.py`), it has four int8 only in formats without HALVES.
QUADS = register_lanes() == 4 and has_quad_dot()
TILES = register_lanes() == 16 and has_tiles()
# Number of columns that are expanded together. The int16 quants of ROWS rows take 16 KB, half of the usual L1 cache.
# With AMX, DEPTH is twice as large, because the L1 cache has 48 KB, and the quants of most formats are int8.
DEPTH = (16384 if TILES else 8192) // ROWS
# Bits of a format's kind. HALVES: the format has a scale for each 16 columns; BIASED: weights have offsets; UNSIGNED:
# quants are from 0 to 255.
HALVES, BIASED, UNSIGNED = 1, 2, 4


# The type of 32 quants, as 8 words of 4 bytes.
quants_32 = Vector(types.int32, _EIGHT)


# ---- quants of 32 columns ----


@intrinsic
def load_32(typing: Any, data: Any, at: Any) -> Any:
    """Load 32 bytes from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_as(context, builder, signature, args, _EIGHT)

    return quants_32(data, types.int64), generate


@intrinsic
def load_nibbles(typing: Any, data: Any, at: Any) -> Any:
    """Load 32 quants of 4 bits from byte `at` on: the low four bits of 16 bytes, then their high four bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = load_as(context, builder, signature, args, ir.VectorType(_I8, 16))
        both = shuffled(builder, packed, packed, [*range(16), *range(16)])
        # x86-64 has no shift of bytes, so words are shifted, and bits that came from the next byte are masked.
        words = builder.lshr(builder.bitcast(both, _EIGHT), ir.Constant(_EIGHT, [0] * 4 + [4] * 4))
        return builder.and_(words, ir.Constant(_EIGHT, [0x0F0F0F0F] * 8))

    return quants_32(data, types.int64), generate


@intrinsic
def load_bits(typing: Any, data: Any, at: Any, value: Any) -> Any:
    """Load 32 bits from byte `at` on; return 32 bytes: `value` where the bit is 1, and 0 where it is 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = load_as(context, builder, signature, args, ir.VectorType(_I8, 4))
        spread = shuffled(builder, packed, packed, [i // 8 for i in range(32)])
        bit = ir.Constant(_BYTES, [1 << i % 8 for i in range(32)])
        is_set = builder.icmp_unsigned("==", builder.and_(spread, bit), bit)
        wide = builder.sext(is_set, _BYTES)
        one = builder.bitcast(builder.trunc(args[2], _I8), ir.VectorType(_I8, 1))
        every = shuffled(builder, one, one, [0] * 32)
        return builder.bitcast(builder.and_(wide, every), _EIGHT)

    return quants_32(data, types.int64, types.int64), generate


@intrinsic
def plus(typing: Any, quants: Any, n: Any) -> Any:
    """Add n to each of 32 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.bitcast(builder.trunc(args[1], _I8), ir.VectorType(_I8, 1))
        return builder.bitcast(
            builder.add(builder.bitcast(args[0], _BYTES), shuffled(builder, one, one, [0] * 32)), _EIGHT
        )

    return quants_32(quants_32, types.int64), generate


@intrinsic
def union(typing: Any, a: Any, b: Any) -> Any:
    """Return `a | b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(*args)

    return quants_32(quants_32, quants_32), generate


@intrinsic
def narrowed(typing: Any, low: Any, high: Any) -> Any:
    """Return the lowest byte of each word of two vectors of 16 words, as 32 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = (builder.trunc(a, ir.VectorType(_I8, 16)) for a in args)
        return builder.bitcast(shuffled(builder, low, high, list(range(32))), _EIGHT)

    return quants_32(lanes, lanes), generate


def in_halves(quants: Callable[..., Any]) -> Any:
    """Make the function that splits the result of `quants`, a vector with 64 quants, into two vectors of 32 bytes."""

    @jit
    def pair(blocks: Any, at: int, p: int) -> Any:
        return _halves(quants(blocks, at, p))

    return pair


@intrinsic
def _halves(typing: Any, words: Any) -> Any:
    """Return the first and the last 32 bytes of 16 words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = [shuffled(builder, args[0], args[0], list(range(first, first + 8))) for first in (0, 8)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(quants_32, 2)(lanes), generate


def levels_of(levels: Sequence[int]) -> Any:
    """Make the function that returns `levels[quant]` for 32 quants of 4 bits; levels are signed bytes."""

    @intrinsic
    def find(typing: Any, quants: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            whole = builder.bitcast(args[0], _BYTES)
            parts = [shuffled(builder, whole, whole, list(range(first, first + 16))) for first in (0, 16)]
            low, high = (look_up(builder, levels, part) for part in parts)
            return builder.bitcast(shuffled(builder, low, high, list(range(32))), _EIGHT)

        return quants_32(quants_32), generate

    return find


# ---- a panel ----


def transposed_4(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose two matrices of 4 x 4 words: the first halves of four vectors of 8 words, and their last halves."""
    pairs = []
    for a, b in (rows[:2], rows[2:]):
        pairs.append(shuffled(builder, a, b, [0, 8, 1, 9, 4, 12, 5, 13]))
        pairs.append(shuffled(builder, a, b, [2, 10, 3, 11, 6, 14, 7, 15]))
    fours = []
    for a, b in zip(pairs[:2], pairs[2:], strict=True):
        fours.append(shuffled(builder, a, b, [0, 1, 8, 9, 4, 5, 12, 13]))
        fours.append(shuffled(builder, a, b, [2, 3, 10, 11, 6, 7, 14, 15]))
    return fours


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 8 x 8 words: return 8 vectors; vector i has word i of each row."""
    low, high = transposed_4(builder, rows[:4]), transposed_4(builder, rows[4:])
    found = [shuffled(builder, a, b, [0, 1, 2, 3, 8, 9, 10, 11]) for a, b in zip(low, high, strict=True)]
    return found + [shuffled(builder, a, b, [4, 5, 6, 7, 12, 13, 14, 15]) for a, b in zip(low, high, strict=True)]


def _words_of(builder: Any, bytes_: Any, kind: int) -> list[Any]:
    """Return four columns of 8 rows as words of a panel: two vectors of int16 pairs, or one vector of int8 quads.

    With QUADS, unsigned quants become signed: 128 is subtracted.
    """
    unsigned = kind & UNSIGNED
    if TILES and not kind & HALVES:
        return [bytes_]
    if QUADS:
        return [builder.xor(bytes_, ir.Constant(_EIGHT, [0x80808080 - (1 << 32)] * 8))] if unsigned else [bytes_]
    eight, shorts = ir.Constant(_SHORTS, [8] * 16), builder.bitcast(bytes_, _SHORTS)
    if unsigned:
        return [builder.and_(shorts, ir.Constant(_SHORTS, [255] * 16)), builder.lshr(shorts, eight)]
    return [builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)]


def _put_quants(kind: int) -> Any:
    """Make the function that writes 32 quants of each of 8 rows to a panel; `kind` is the kind of the format."""

    @intrinsic
    def write(typing: Any, out: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = 0
            for bytes_ in transposed(builder, list(args[1:])):
                for words in _words_of(builder, bytes_, kind):
                    place = builder.add(args[0], ir.Constant(_I64, 4 * ROWS * at))
                    builder.store(words, builder.inttoptr(place, words.type.as_pointer())).align = 4
                    at += 1
            return context.get_dummy_value()

        return types.void(types.int64, *[quants_32] * 8), generate

    return write


@intrinsic
def _put_scales(typing: Any, to: Any, scales: Any) -> Any:
    """Write the scales of 8 rows to address `to`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, floats_8), generate


class Panel(NamedTuple):
    """The kernel that expands rows of a format to a panel, and the kind of the format.

    `expand(weights, step, n_rows, n_columns, out, scratch)` writes the panel of `n_rows` stored rows to address `out`.
    If `n_rows` is less than ROWS, the last row is repeated. `n_columns` is a multiple of the block size. Rows begin at
    address `weights` and are `step` bytes apart. `scratch` is the address of `FORMAT_SCRATCH` bytes of scratch memory.
    """

    expand: Any
    kind: int


def panel_of_groups(
    block: int, block_bytes: int, scales: Scales, quants_of: Callable[..., Any], kind: int = 0
) -> Panel:
    """Make the `Panel` of a format whose blocks have one scale.

    A block has `block` columns, a multiple of 32. `quants_of(blocks, at, p)` returns quants 32 p to 32 p + 31 of the
    block at byte `at`. `kind` is BIASED, UNSIGNED, their sum, or 0.
    """
    write, n_groups, gather = _put_quants(kind), block // 32, scales.gather

    @jit
    def expand(weights: int, step: int, n_rows: int, n_columns: int, out: int, scratch: int) -> None:
        for first in range(0, ROWS, 8):
            a, b = weights + min(first, n_rows - 1) * step, weights + min(first + 1, n_rows - 1) * step
            c, d = weights + min(first + 2, n_rows - 1) * step, weights + min(first + 3, n_rows - 1) * step
            e, f = weights + min(first + 4, n_rows - 1) * step, weights + min(first + 5, n_rows - 1) * step
            g, h = weights + min(first + 6, n_rows - 1) * step, weights + min(first + 7, n_rows - 1) * step
            for i in range(n_columns // 32):
                at, p, to = i // n_groups * block_bytes, i % n_groups, out + 4 * (i * ROW_WORDS * ROWS + first)
                write(
                    to, quants_of(raw(a), at, p), quants_of(raw(b), at, p), quants_of(raw(c), at, p),
                    quants_of(raw(d), at, p), quants_of(raw(e), at, p), quants_of(raw(f), at, p),
                    quants_of(raw(g), at, p), quants_of(raw(h), at, p),
                )  # fmt: skip
                own, offsets = gather(a + at, b + at, c + at, d + at, e + at, f + at, g + at, h + at)
                _put_scales(to + 4 * 16 * ROWS, own)
                if kind & BIASED:
                    _put_scales(to + 4 * 17 * ROWS, offsets)

    return Panel(expand, kind)


def panel_by_parts(
    block_bytes: int, scales_of: Callable[..., Any], quants_of: Callable[..., Any], places: Sequence[int],
    minima: Sequence[int] = (), kind: int = 0,
) -> Panel:  # fmt: skip
    """Make the `Panel` of a format whose blocks have 256 weights.

    `scales_of(blocks, at)` returns one or two SIMD vectors of 16 numbers: the scales of the block at byte `at`, and its
    minima (negated offsets) if the format has minima. `quants_of(blocks, at, p)` returns quants 64 p to 64 p + 63 of
    the block in two vectors. For each 32 columns, or for each 16 with HALVES, `places` has the index of the scale in
    these 16 or 32 numbers, and `minima` has the index of the minimum. `minima` is empty if the format has no minima.
    `kind` is HALVES or 0.
    """
    write, scales_put = _put_quants(kind), _scale_writer(scales_of, places, minima, kind)

    @jit
    def expand(weights: int, step: int, n_rows: int, n_columns: int, out: int, scratch: int) -> None:
        blocks = raw(weights)
        for first in range(0, ROWS, 8):
            a, b = min(first, n_rows - 1) * step, min(first + 1, n_rows - 1) * step
            c, d = min(first + 2, n_rows - 1) * step, min(first + 3, n_rows - 1) * step
            e, f = min(first + 4, n_rows - 1) * step, min(first + 5, n_rows - 1) * step
            g, h = min(first + 6, n_rows - 1) * step, min(first + 7, n_rows - 1) * step
            for i in range(n_columns // 64):
                at, p, to = i // 4 * block_bytes, i % 4, out + 4 * (2 * i * ROW_WORDS * ROWS + first)
                of_a, of_b = quants_of(blocks, a + at, p), quants_of(blocks, b + at, p)
                of_c, of_d = quants_of(blocks, c + at, p), quants_of(blocks, d + at, p)
                of_e, of_f = quants_of(blocks, e + at, p), quants_of(blocks, f + at, p)
                of_g, of_h = quants_of(blocks, g + at, p), quants_of(blocks, h + at, p)
                write(to, of_a[0], of_b[0], of_c[0], of_d[0], of_e[0], of_f[0], of_g[0], of_h[0])
                to += 4 * ROW_WORDS * ROWS
                write(to, of_a[1], of_b[1], of_c[1], of_d[1], of_e[1], of_f[1], of_g[1], of_h[1])
            for r in range(8):
                row = min(first + r, n_rows - 1) * step
                for i in range(n_columns // 256):
                    to = out + 4 * (8 * i * ROW_WORDS * ROWS + first + r)
                    scales_put(blocks, row + i * block_bytes, to, scratch)

    return Panel(expand, kind | BIASED if minima else kind)


def _scale_writer(scales_of: Callable[..., Any], places: Sequence[int], minima: Sequence[int], kind: int) -> Any:
    """Make the function that writes the scales and offsets of one block of a row to a panel."""
    of_scales, of_minima, by_halves = tuple(places), tuple(minima) or (0,), kind & HALVES != 0
    has_minima, has_two_vectors = bool(minima), max(minima, default=0) >= 16

    @jit
    def write(blocks: Any, at: int, out: int, scratch: int) -> None:
        stored, words = floats(scratch), floats(out)
        if has_two_vectors:
            scales, least = scales_of(blocks, at)
            store(stored, 0, scales)
            store(stored, 16, least)
        else:
            store(stored, 0, scales_of(blocks, at))
        for i in range(len(of_scales)):
            to = ((i // 2 * ROW_WORDS + 16 + 2 * (i % 2)) if by_halves else (i * ROW_WORDS + 16)) * ROWS
            put(words, to, get(stored, of_scales[i]))
            if has_minima:
                put(words, to + ROWS, -get(stored, of_minima[i]))

    return write
