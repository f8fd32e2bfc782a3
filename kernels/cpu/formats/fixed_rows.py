"""Gemv in fixed point (`--activations i16`): multiply a few tokens with weight rows as stored, 8 rows at a time.

Activations are quantised to int16, with a scale per block of 32 columns; `products/fixed_numpy.py` defines the
arithmetic. Within a block, the sum of the products of quants is an exact integer, so the order of its terms is free.
The sums of 8 rows are then multiplied by the scales of the rows and of the token, and added to a vector of 8 floats,
one per row.

A register holds 16 columns of several rows, 16 bytes per row: two rows with AVX2, four with AVX-512, one with NEON. A
register of sums has four int32 partial sums of each row, also in 16 bytes. There are two forms of operands:

- *pairs*: shifts or masks convert the bytes of a row to int16, in one register for the even columns and in another one
  for the odd columns. On x86-64, one instruction multiplies the int16 and adds each two adjacent products.
- *digits*, on arm64 with sdot and on x86-64 with VNNI: the quants of rows stay bytes, and a token's quant is two bytes,
  `256 * high + low`.

A token has a *record* of RECORD_BYTES for each block of 32 columns: the token's quants, then its scale and sums
(`SCALE`, ...). The quants are stored for each 16 columns separately: with *pairs*, 8 quants of even columns, then 8 of
odd columns; with *digits*, 16 high bytes, then 16 low bytes. Two tokens are stored together: both records of the first
block, then both of the second block, ... The records of the next two tokens follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..build.jit import inlined, jit
from ..build.layout import LINE_BYTES
from ..build.memory import hidden, raw
from ..build.vectors import Vector, call_llvm, everywhere, load_as, pair_dot, prefetch, register_lanes, vector
from ..build.vectors import lanes as shuffled
from .panels import BIASED, HALVES, QUADS, quants_32, transposed, transposed_4
from .quants import both, either, right, side_by_side
from .scales import ROWS, Scales, both_halves, floats_8, gathered_halves, load_at
from .sums import no_sums

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS, _FLOATS, _WORDS = ir.VectorType(_I32, 8), ir.VectorType(_F32, 8), ir.VectorType(_I16, 8)

# Number of rows in a register, and number of registers for the ROWS (8) rows that are multiplied together.
_IN_REGISTER = register_lanes() // 4
_REGISTERS = ROWS // _IN_REGISTER
# Number of blocks of 32 columns whose sums are reduced together. With AVX-512, this takes half as many instructions.
TOGETHER = 2 if _REGISTERS == 2 else 1
# Whether operands are digits: sdot needs bytes, and VNNI's vpdpbusd adds four products of bytes at once.
DIGITS = QUADS or pair_dot().endswith("vpdpwssd")
# The most tokens that are multiplied with 8 rows at a time.
PAIR = 2
# The most tokens that are multiplied with rows as they are stored. For more tokens, tiles (`fixed_tile.py`) are faster,
# except for Q4_K with VNNI. On one thread of a Xeon, the CPU time of tiles divided by the CPU time of stored rows was,
# for Q8_0, Q4_K and Q6_K:
# - with VNNI, 0.67, 1.02 and 0.66 for 8 tokens; 0.75, 1.24 and 0.86 for 5 tokens
# - with AVX2, 0.66, 0.88 and 0.69 for 8 tokens; 0.73, 0.98 and 0.85 for 5 tokens; for Q8_0 and 4 tokens, 1.23
TOKENS = PAIR if QUADS else 4
RECORD_BYTES = 96
# Byte offsets in the record of a block:
# - float32: SCALE; TOTAL, the scale times the sum of the quants; HALF_TOTALS, the same for each 16 columns
# - int32: INT_TOTAL, the sum of the quants times TIMES_OF_WHOLE; INT_HALF_TOTALS, for each 16 columns the sum times
#   TIMES_OF_HALVES
SCALE, TOTAL, HALF_TOTALS, INT_TOTAL, INT_HALF_TOTALS = 64, 68, 72, 80, 84
# Files store quant + 8 for Q4_0 and quant + 32 for Q6_K. So 8 or 32 times the sum of the token's quants must be
# subtracted from a sum of products. The int32 sums in a record are already multiplied by -8 (sums of 32 columns) or by
# -32 (sums of 16 columns, because Q6_K has a scale for each 16 columns), so one addition is enough.
TIMES_OF_WHOLE, TIMES_OF_HALVES = -8, -32

# The forms in which the quants of rows are stored:
# - BYTES and UNSIGNED_BYTES: 32 bytes for 32 columns
# - NIBBLES: 16 bytes, with the first 16 columns in the low four bits and the next 16 in the high four bits
# - NIBBLES_OF_64: 32 bytes, with the first 32 columns in the low four bits and the next 32 in the high four bits
# - SIX_BITS_OF_128: 64 bytes with the low four bits and 32 bytes with the high two bits of 128 columns, as in Q6_K
BYTES, UNSIGNED_BYTES, NIBBLES, NIBBLES_OF_64, SIX_BITS_OF_128 = range(5)
# Maps each form for more than 32 columns to its number of blocks of 32 columns.
_BLOCKS = {NIBBLES_OF_64: 2, SIX_BITS_OF_128: 4}
# Whether the high four bits of NIBBLES_OF_64 are multiplied in place, as 16 times the quant. Then only the sums of
# products are shifted, which takes fewer instructions. sdot multiplies signed bytes, so it needs shifted bits.
_IN_PLACE = not QUADS
# The form whose bytes need an offset of 128 with digits: sdot needs signed bytes of rows, so 128 is subtracted from
# unsigned bytes; vpdpbusd needs unsigned bytes, so 128 is added to signed bytes.
_MOVED = UNSIGNED_BYTES if QUADS else BYTES


# The type of 16 bytes with 32 quants of 4 bits.
packed_16 = Vector(types.int8, ir.VectorType(_I8, 16))


# ---- scales of 8 rows ----


def _blocks_at_once(block_bytes: int, words: int) -> int:
    """Return how many blocks' scales one load of 64 bytes reads: 2 or 4, or 0 if neither is possible.

    `words` is `Scales.words`. Only AVX-512 has such loads. The blocks have at least 64 bytes together, so that the load
    does not read beyond them.
    """
    fits = [n for n in (2, 4) if (n - 1) * block_bytes + 2 * words <= 64 <= n * block_bytes]
    return fits[0] if fits and words and TOGETHER == 2 else 0


def _scales_of_blocks(block_bytes: int, words: int) -> Any:
    """Make the function that returns the scales and the offsets of `_blocks_at_once` blocks of the rows at 8 addresses.

    `words` is 2 for scales and offsets. It is 1 for scales only; the scales are then returned twice. 64 bytes of each
    row are loaded. One shuffle per row moves the row's scales to the row's lanes, and another one moves its offsets.
    """
    n = _blocks_at_once(block_bytes, words)
    several = types.UniTuple(floats_8, n)

    @intrinsic
    def gather(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded, found = [load_at(builder, address, 0, ir.VectorType(_I16, 32)) for address in args], []
            for word in range(words):
                halves = loaded[0]
                for r, row in enumerate(loaded):
                    places = [
                        32 + i // ROWS * block_bytes // 2 + word if i % ROWS == r and i < n * ROWS else i
                        for i in range(32)
                    ]
                    halves = shuffled(builder, halves, row, places)
                for lane in range(0, n * ROWS, 2 * ROWS):
                    two = shuffled(builder, halves, halves, list(range(lane, lane + 2 * ROWS)))
                    wide = builder.bitcast(two, ir.VectorType(_F16, 2 * ROWS))
                    wide = builder.fpext(wide, ir.VectorType(_F32, 2 * ROWS))
                    found += [shuffled(builder, wide, wide, list(range(at, at + ROWS))) for at in (0, ROWS)]
            pair = [context.make_tuple(builder, several, part) for part in (found[:n], found[-n:])]
            return context.make_tuple(builder, signature.return_type, pair)

        return types.UniTuple(several, 2)(*[types.int64] * ROWS), generate

    return gather


@intrinsic
def _put_scales(typing: Any, to: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Write 16 scales of each of 8 rows to address `to`: scale 0 of all rows, then scale 1 of all rows, ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = 0
        for low in (0, 8):
            parts = [shuffled(builder, row, row, list(range(low, low + 8))) for row in args[1:]]
            for found in transposed(builder, [builder.bitcast(part, _SUMS) for part in parts]):
                place = builder.add(args[0], ir.Constant(_I64, 4 * ROWS * at))
                builder.store(found, builder.inttoptr(place, _SUMS.as_pointer())).align = 4
                at += 1
        return context.get_dummy_value()

    return types.void(types.int64, *[vector] * ROWS), generate


def _load_scales(n: int) -> Any:
    """Make the function that loads n consecutive scales of 8 rows, from scale i on, as `_put_scales` writes them."""

    @intrinsic
    def load(typing: Any, address: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(_I64, 4 * ROWS)))
            found = [load_at(builder, place, 4 * ROWS * scale, _FLOATS) for scale in range(n)]
            return context.make_tuple(builder, signature.return_type, found)

        return types.UniTuple(floats_8, n)(types.int64, types.int64), generate

    return load


@intrinsic
def words_of_rows(typing: Any, rows: Any, at: Any) -> Any:
    """Load four int32 of each of 8 rows, from byte `at` on; return four vectors: vector i has int32 i of every row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = ir.VectorType(_I32, 4)
        rows = [load_at(builder, builder.add(row, args[1]), 0, four) for row in cgutils.unpack_tuple(builder, args[0])]
        pairs = [side_by_side(builder, [rows[r], rows[r + 4]]) for r in range(4)]
        return context.make_tuple(builder, signature.return_type, transposed_4(builder, pairs))

    return types.UniTuple(quants_32, 4)(rows, types.int64), generate


@intrinsic
def halves_of_words(typing: Any, words: Any) -> Any:
    """Return the first and the second float16 of each of 8 words, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, both_halves(builder, args[0], "f16"))

    return types.UniTuple(floats_8, 2)(words), generate


@intrinsic
def halves_of_rows(typing: Any, rows: Any, at: Any) -> Any:
    """Return the float16 at byte `at` of each of 8 rows, as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = [builder.add(row, args[1]) for row in cgutils.unpack_tuple(builder, args[0])]
        return gathered_halves(builder, addresses, 0)

    return floats_8(rows, types.int64), generate


@intrinsic
def put_four_scales(typing: Any, to: Any, words: Any, factors: Any) -> Any:
    """Write 4 scales of 8 rows to address `to`: scale i is signed byte i of the row's word times the row's factor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, words, factors = args
        for i in range(4):
            left, right = (ir.Constant(_SUMS, [bits] * ROWS) for bits in (24 - 8 * i, 24))
            scale = builder.sitofp(builder.ashr(builder.shl(words, left), right), _FLOATS)
            place = builder.add(to, ir.Constant(_I64, 4 * ROWS * i))
            builder.store(builder.fmul(scale, factors), builder.inttoptr(place, _FLOATS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, words, floats_8), generate


@intrinsic
def _minus(typing: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fneg(args[0])

    return a(a), generate


@inlined
def put_scales_of_6(to: int, rows: Any, at: int) -> None:
    """For the Q4_K or Q5_K blocks at byte `at` of 8 rows, write 8 scales and 8 negated minima to address `to`.

    `quants.load_scales_of_6` describes how a block stores them.
    """
    factors, low, low_of_minima, rest = words_of_rows(rows, at)
    factor, factor_of_minima = halves_of_words(factors)
    factor_of_minima = _minus(factor_of_minima)
    put_four_scales(to, both(low, 0x3F3F3F3F), factor)
    high = both(right(low, 2), 0x30303030)
    put_four_scales(to + 128, either(both(rest, 0x0F0F0F0F), high), factor)
    put_four_scales(to + 256, both(low_of_minima, 0x3F3F3F3F), factor_of_minima)
    high = both(right(low_of_minima, 2), 0x30303030)
    put_four_scales(to + 384, either(both(right(rest, 4), 0x0F0F0F0F), high), factor_of_minima)


# ---- sums of a block ----


@intrinsic
def load_16(typing: Any, data: Any, at: Any) -> Any:
    """Load 16 bytes from byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_as(context, builder, signature, args, ir.VectorType(_I8, 16))

    return packed_16(data, types.int64), generate


def _in_registers(builder: Any, rows: list[Any]) -> list[Any]:
    """Return 16 bytes of each row in registers: register g has rows g, g + _REGISTERS, ..."""
    return [side_by_side(builder, rows[g::_REGISTERS]) for g in range(_REGISTERS)]


def _nibbles(builder: Any, registers: list[Any], *, in_place: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the low four bits and the high four bits of bytes; with `in_place`, the high bits are not shifted right.

    x86-64 has no shift of bytes, so pairs of bytes are shifted as int16, and then masked.
    """
    n = registers[0].type.count
    if in_place:
        masks = [ir.Constant(registers[0].type, [mask] * n) for mask in (0x0F, -0x10)]
        low, high = ([builder.and_(register, mask) for register in registers] for mask in masks)
        return low, high
    fifteen, four = (
        ir.Constant(ir.VectorType(_I8, n), [15] * n),
        ir.Constant(ir.VectorType(_I16, n // 2), [4] * (n // 2)),
    )
    low, high = [], []
    for register in registers:
        shifted = builder.lshr(builder.bitcast(register, four.type), four)
        low.append(builder.and_(register, fifteen))
        high.append(builder.and_(builder.bitcast(shifted, register.type), fifteen))
    return low, high


def _six_bits(builder: Any, low: list[Any], second_low: list[Any], high: list[Any]) -> list[list[Any]]:
    """Return 16 columns of each of four blocks, whose bits are stored as in Q6_K."""
    n = high[0].type.count
    words, mask = ir.VectorType(_I16, n // 2), ir.Constant(high[0].type, [0x30] * n)
    (first, third), (second, fourth) = _nibbles(builder, low), _nibbles(builder, second_low)
    found = []
    for block, nibbles in enumerate((first, second, third, fourth)):
        shift, by = (builder.lshr, 2) if block == 3 else (builder.shl, 4 - 2 * block)
        moved = [shift(builder.bitcast(register, words), ir.Constant(words, [by] * (n // 2))) for register in high]
        top = [builder.and_(builder.bitcast(register, mask.type), mask) for register in moved]
        found.append([builder.or_(a, b) for a, b in zip(nibbles, top, strict=True)])
    return found


def _halves_of(builder: Any, rows: list[Any], stored: int) -> tuple[list[Any], list[Any]]:
    """Return the registers of the first 16 columns and of the last 16 columns of a block of 32."""
    if stored == NIBBLES:
        return _nibbles(builder, _in_registers(builder, rows))
    kind = ir.VectorType(_I8, 32)
    whole = [builder.bitcast(row, kind) for row in rows]
    first, last = (
        _in_registers(builder, [shuffled(builder, row, row, list(range(start, start + 16))) for row in whole])
        for start in (0, 16)
    )
    return first, last


def _unpacked(builder: Any, rows: list[Any], places: list[Any], stored: int) -> Iterator[list[Any]]:
    """Yield lists of blocks of 32 columns; a block is two lists of registers, as `_halves_of` returns them.

    If the form `stored` is not in `_BLOCKS`, `rows` has the quants of 8 rows for each block. One list is yielded, whose
    blocks have all their registers. If the form is in `_BLOCKS`, `rows` has the addresses of 8 rows, and `places` the
    byte offsets of parts of 16 bytes. A list then has all blocks, but only two registers of each half of a block,
    because AVX2 has too few registers for all rows at once. So AVX-512 needs one list, AVX2 two, and NEON four.
    """
    if stored not in _BLOCKS:
        yield [_halves_of(builder, rows[at : at + ROWS], stored) for at in range(0, len(rows), ROWS)]
        return
    kind = ir.VectorType(_I8, 16)
    for g in range(0, _REGISTERS, 2):
        of_registers = [
            [[load_at(builder, builder.add(row, place), 0, kind) for place in places] for row in rows[r::_REGISTERS]]
            for r in (g, g + 1)
        ]
        parts = [
            [side_by_side(builder, [row[part] for row in of_rows]) for of_rows in of_registers]
            for part in range(len(places))
        ]
        sides: list[Any] = (
            [_nibbles(builder, part, in_place=_IN_PLACE) for part in parts]
            if stored == NIBBLES_OF_64
            else [_six_bits(builder, parts[half], parts[2 + half], parts[4 + half]) for half in range(2)]
        )
        yield list(zip(*sides, strict=True))


def _pair_products(builder: Any, a: Any, b: Any) -> Any:
    """Multiply int16 numbers, and return the sum of each two adjacent products."""
    n = a.type.count
    if pair_dot():
        name = {16: "llvm.x86.avx2.pmadd.wd", 32: "llvm.x86.avx512.pmaddw.d.512"}[n]
        return call_llvm(builder, name, ir.VectorType(_I32, n // 2), [a, b])
    wide = ir.VectorType(_I32, n)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (shuffled(builder, products, products, list(range(odd, n, 2))) for odd in (0, 1))
    return builder.add(even, odd)


def _operands(builder: Any, register: Any, stored: int) -> list[Any]:
    """Return the quants of rows as operands: bytes (digits), or int16 of the even and of the odd columns (pairs)."""
    n = register.type.count
    if DIGITS:
        return [builder.xor(register, ir.Constant(register.type, [-128] * n)) if stored == _MOVED else register]
    kind = ir.VectorType(_I16, n // 2)
    eight, words = ir.Constant(kind, [8] * (n // 2)), builder.bitcast(register, kind)
    if stored == BYTES:
        return [builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)]
    return [builder.and_(words, ir.Constant(kind, [255] * (n // 2))), builder.lshr(words, eight)]


def _token(builder: Any, record: Any, half: int) -> list[Any]:
    """Return the quants of a token for 16 columns as two registers; a register repeats its 16 bytes for each row."""
    kind = ir.VectorType(_I8, 16) if DIGITS else _WORDS
    n = kind.count
    parts = [load_at(builder, record, 32 * half + 16 * i, kind) for i in range(2)]
    return [shuffled(builder, part, part, list(range(n)) * _IN_REGISTER) for part in parts]


def _digit_dots(builder: Any, operands: list[list[Any]], x: list[list[Any]]) -> Any:
    """Return four sums of products for each row of a register of unsigned bytes, by vpdpbusd."""
    kind = ir.VectorType(_I32, register_lanes())
    name, eight = f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}", ir.Constant(kind, [8] * kind.count)
    found = ir.Constant(kind, None)
    for digit in range(2):
        if digit:
            found = builder.shl(found, eight)
        for (bytes_,), of_token in zip(operands, x, strict=True):
            words = [builder.bitcast(one, kind) for one in (bytes_, of_token[digit])]
            found = call_llvm(builder, name, kind, [found, *words])
    return found


def _dots(builder: Any, operands: list[list[Any]], x: list[list[Any]]) -> Any:
    """Return the sums of products of one register, four sums for each row.

    `operands` and `x` have an item for each 16 columns that are summed.
    """
    if DIGITS and not QUADS:
        return _digit_dots(builder, operands, x)
    if QUADS:
        name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(_I32, 4)
        high = low = ir.Constant(kind, None)
        for (bytes_,), (x_high, x_low) in zip(operands, x, strict=True):
            high = call_llvm(builder, name, kind, [high, bytes_, x_high])
            low = call_llvm(builder, name, kind, [low, bytes_, x_low])
        return builder.add(builder.shl(high, ir.Constant(kind, [8] * 4)), low)
    found = None
    for words, of_token in zip(operands, x, strict=True):
        for a, b in zip(words, of_token, strict=True):
            products = _pair_products(builder, a, b)
            found = products if found is None else builder.add(found, products)
    return found


def _joined_sums(builder: Any, a: Any, b: Any, *, apart: int) -> Any:
    """Add lanes that are `apart` lanes apart within 16 bytes; each 16 bytes of the result have sums of a, then of b."""
    n = a.type.count
    low = [i for i in range(4) if not i & apart]
    places = [source + start + i for start in range(0, n, 4) for source in (0, n) for i in low]
    return builder.add(shuffled(builder, a, b, places), shuffled(builder, a, b, [place + apart for place in places]))


def _joined_pairs(builder: Any, registers: list[Any]) -> list[Any]:
    """Reduce the four partial sums of each row to two sums, in half as many registers."""
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [_joined_sums(builder, a, b, apart=2) for a, b in pairs]


def _folded(builder: Any, registers: list[Any]) -> Any:
    """Return the totals of 8 rows, in order, from the result of `_joined_pairs`."""
    if len(registers) == 1:  # AVX-512: one register has two sums of each row
        even, odd = (shuffled(builder, registers[0], registers[0], list(range(odd, 16, 2))) for odd in (0, 1))
        return builder.add(even, odd)
    pairs = zip(registers[::2], registers[1::2], strict=True)
    registers = [_joined_sums(builder, a, b, apart=1) for a, b in pairs]
    if len(registers) > 1:  # NEON: two registers have the totals of four rows each
        return shuffled(builder, registers[0], registers[1], list(range(ROWS)))
    return registers[0]


def _folded_pair(builder: Any, a: list[Any], b: list[Any]) -> list[Any]:
    """Return `_folded(a)` and `_folded(b)`, for AVX-512."""
    even, odd = (shuffled(builder, a[0], b[0], list(range(odd, 32, 2))) for odd in (0, 1))
    both = builder.add(even, odd)
    return [shuffled(builder, both, both, list(range(lane, lane + ROWS))) for lane in (0, ROWS)]


def _all_folded(builder: Any, sums: list[list[Any]]) -> list[Any]:
    """Return the totals of 8 rows for each of several blocks, or halves of blocks."""
    if TOGETHER == 1 or len(sums) % 2:
        return [_folded(builder, registers) for registers in sums]
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [one for a, b in pairs for one in _folded_pair(builder, a, b)]


# ---- one step: 32, 64 or 128 columns of 8 rows ----


class _Step:
    """Functions that generate the LLVM IR of one step (`_step`), and the arguments that they share."""

    def __init__(self, builder: Any, n: int, stored: int, kind: int, minus: int) -> None:
        self.builder, self.n, self.stored, self.kind, self.minus = builder, n, stored, kind, minus
        if DIGITS and stored == _MOVED:
            self.minus += -128 if QUADS else 128

    def record(self, records: Any, block: int, t: int) -> Any:
        """Return the address of the record of token t for a block."""
        return self.builder.add(records, ir.Constant(_I64, RECORD_BYTES * (block * self.n + t)))

    def dots(self, halves: list[Any], record: Any) -> list[list[Any]]:
        """Return the partial sums (`_joined_pairs`) of registers of a block: one list, or with HALVES two lists."""
        x = [_token(self.builder, record, half) for half in range(2)]
        parts = [[0], [1]] if self.kind & HALVES else [[0, 1]]
        found = [
            [
                _dots(self.builder, [halves[half][g] for half in part], [x[half] for half in part])
                for g in range(len(halves[0]))
            ]
            for part in parts
        ]
        return [_joined_pairs(self.builder, registers) for registers in found]

    def all_dots(self, rows: list[Any], places: list[Any], records: Any, n_sums: int) -> list[list[list[Any]]]:
        """Return the partial sums of 8 rows: in `found[t][s]` the registers of sum s of token t.

        A token has `n_sums` sums: one for each block, or with HALVES for each half of a block.
        """
        found: list[list[list[Any]]] = [[[] for _ in range(n_sums)] for _ in range(self.n)]
        for blocks in _unpacked(self.builder, rows, places, self.stored):
            for b, halves in enumerate(blocks):
                operands = [[_operands(self.builder, one, self.stored) for one in half] for half in halves]
                for t, of_token in enumerate(found):
                    dots = self.dots(operands, self.record(records, b, t))
                    for sums, some in zip(of_token[b * len(dots) :], dots, strict=False):
                        sums += some
        return found

    def minus_totals(self, sums: list[Any], record: Any) -> list[Any]:
        """Return the sums of a block, corrected for `minus`, by which every quant of the rows is too large."""
        if not self.minus:
            return sums
        totals, found = [INT_HALF_TOTALS, INT_HALF_TOTALS + 4] if self.kind & HALVES else [INT_TOTAL], []
        for one, total in zip(sums, totals, strict=True):
            whole = everywhere(self.builder, load_at(self.builder, record, total, _I32), ROWS)
            times = -self.minus // (TIMES_OF_HALVES if self.kind & HALVES else TIMES_OF_WHOLE)
            found.append(self.builder.add(one, self.builder.mul(whole, ir.Constant(_SUMS, [times] * ROWS))))
        return found

    def added(self, y: Any, sums: list[Any], record: Any, scales: list[Any], offsets: list[Any]) -> Any:
        """Return y plus the products of a block, added in the order that `fixed_numpy.py` defines."""
        builder, fma = self.builder, f"llvm.fma.v{ROWS}f32"
        totals = [HALF_TOTALS, HALF_TOTALS + 4] if self.kind & HALVES else [TOTAL]
        of_token = everywhere(builder, load_at(builder, record, SCALE, _F32), ROWS)
        for one, scale, offset, total in zip(sums, scales, offsets, totals, strict=True):
            if self.kind & BIASED:
                at = everywhere(builder, load_at(builder, record, total, _F32), ROWS)
                y = call_llvm(builder, fma, _FLOATS, [offset, at, y])
            whole = builder.sitofp(one, _FLOATS)
            y = call_llvm(builder, fma, _FLOATS, [whole, builder.fmul(scale, of_token), y])
        return y


def _step(n: int, stored: int, kind: int = 0, minus: int = 0, together: int = 1) -> Any:
    """Make the function that adds blocks of 32 columns of 8 rows to the products of n tokens.

    Its arguments `rows` and `places` are those of `_unpacked`. `stored`, `kind` and `minus` are those of
    `eight_rows_by_parts`. A call adds `together` blocks, but `_BLOCKS[stored]` blocks for a form in `_BLOCKS`.
    """
    n_blocks, per_block = _BLOCKS.get(stored, together), 2 if kind & HALVES else 1

    @intrinsic
    def step(typing: Any, records: Any, rows: Any, places: Any, scales: Any, offsets: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own, sums = _Step(builder, n, stored, kind, minus), []
            rows, places, scales, offsets, before = (cgutils.unpack_tuple(builder, some) for some in args[1:])
            dots = own.all_dots(rows, places, args[0], n_blocks * per_block)
            for t, y in enumerate(before):
                folded = _all_folded(builder, dots[t])
                if stored == NIBBLES_OF_64 and _IN_PLACE:
                    folded[1] = builder.ashr(folded[1], ir.Constant(_SUMS, [4] * ROWS))
                for b in range(n_blocks):
                    part, record = slice(b * per_block, (b + 1) * per_block), own.record(args[0], b, t)
                    y = own.added(y, own.minus_totals(folded[part], record), record, scales[part], offsets[part])
                sums.append(y)
            return context.make_tuple(builder, signature.return_type, sums)

        several, products = types.UniTuple(floats_8, n_blocks * per_block), types.UniTuple(floats_8, n)
        return products(types.int64, rows, places, several, several, products), generate

    return step


def _put_products(n: int) -> Any:
    """Make the function that writes products of rows 2 r and 2 r + 1 with token t to `y + r * apart + t * y_row`.

    `y` is an address; `apart` and `y_row` are distances in bytes.
    """

    @intrinsic
    def put(typing: Any, y: Any, apart: Any, y_row: Any, products: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, apart, y_row, products = args
            for t in range(n):
                found = builder.extract_value(products, t)
                for r in range(ROWS):
                    place = builder.add(y, builder.mul(apart, ir.Constant(_I64, r // 2)))
                    place = builder.add(place, builder.mul(y_row, ir.Constant(_I64, t)))
                    place = builder.add(place, ir.Constant(_I64, 4 * (r % 2)))
                    value = builder.extract_element(found, ir.Constant(_I32, r))
                    builder.store(value, builder.inttoptr(place, _F32.as_pointer())).align = 4
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, types.UniTuple(floats_8, n)), generate

    return put


# ---- kernels ----


@jit
def far_and_near(row_bytes: int, ahead: int) -> Any:
    """Return `far, near, edge`: the prefetch distance is `near` for the bytes of a row before byte `edge`, else `far`.

    The prefetched byte is the one that the same stream of memory reads `ahead` bytes later. One stream reads the even
    rows of a range, another one the odd rows, so a stream skips every second row.
    """
    rows = ahead // row_bytes
    near = ahead + rows * row_bytes
    return near + row_bytes, near, row_bytes - (ahead - rows * row_bytes)


@jit
def prefetch_lines(rows: Any, line: int, until: int, places: Any) -> int:
    """For each cache line of 8 rows from byte `line` to `until - 1`, prefetch the line at the distance in `places`.

    `places` is the result of `far_and_near`. Return the first byte of the next line.
    """
    far, near, edge = places
    while line < until:
        place = line + (near if line < edge else far)
        for row in rows:
            prefetch(raw(row), place)
        line += LINE_BYTES
    return line


class EightRows(NamedTuple):
    """The kernel that multiplies rows of a format as they are stored (`_for_tokens`).

    `most` is the most tokens for which the kernel is used.
    """

    multiply: Any
    most: int


def eight_rows_of_groups(
    block: int, block_bytes: int, scales: Scales, quants: Callable[..., Any], stored: int = BYTES,
    kind: int = 0, minus: int = 0,
) -> EightRows:  # fmt: skip
    """Make the kernel of a format whose blocks have one scale.

    A block has `block` columns, a multiple of 32. `quants(blocks, at, p)` returns quants 32 p to 32 p + 31 of the block
    at byte `at`, in the form `stored` (BYTES, ...). `kind` is BIASED (`panels.py`) or 0. `minus`, a multiple of 8, is
    subtracted from every quant.
    """
    n_groups, at_once = block // 32, _blocks_at_once(block_bytes, scales.words) if block == 32 else 0
    together = TOGETHER if n_groups % TOGETHER == 0 else 1
    gather, rows_of = scales.gather, _eight(quants)
    of_blocks: Any = _scales_of_blocks(block_bytes, scales.words) if at_once else None

    def make(n: int) -> Any:
        step, zeros, put = _step(n, stored, kind, minus, together), no_sums(n, floats_8), _put_products(n)

        @inlined
        def add_group(records: int, rows: Any, i: int, p: int, own: Any, offsets: Any, sums: Any) -> Any:
            if together == 2:
                both = rows_of(rows, i, p) + rows_of(rows, i, p + 1)
                return step(records, both, (), (own, own), (offsets, offsets), sums)
            return step(records, rows_of(rows, i, p), (), (own,), (offsets,), sums)

        step_of_two = _step(n, stored, kind, minus, 2)

        @inlined
        def add_blocks(records: int, rows: Any, i: int, own: Any, offsets: Any, sums: Any) -> Any:
            two = rows_of(rows, i, 0) + rows_of(rows, i + block_bytes, 0)
            sums = step_of_two(records, two, (), own[:2], offsets[:2], sums)
            if at_once == 4:
                two = rows_of(rows, i + 2 * block_bytes, 0) + rows_of(rows, i + 3 * block_bytes, 0)
                sums = step_of_two(records + 2 * RECORD_BYTES * n, two, (), own[2:], offsets[2:], sums)
            return sums

        @jit
        def multiply(
            a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, n_columns: int, records: int, y: int,
            apart: int, y_row: int, ahead: int, scratch: int,
        ) -> None:  # fmt: skip
            rows, sums, n_blocks, i, line = (a, b, c, d, e, f, g, h), zeros(), n_columns // block, 0, 0
            places = far_and_near(n_blocks * block_bytes, ahead)
            if at_once:
                for _ in range(n_blocks // at_once):
                    line = prefetch_lines(rows, line, i + at_once * block_bytes, places)
                    all_own, all_offsets = of_blocks(a + i, b + i, c + i, d + i, e + i, f + i, g + i, h + i)
                    sums = add_blocks(records, rows, i, all_own, all_offsets, sums)
                    records += RECORD_BYTES * n * at_once
                    i += at_once * block_bytes
                n_blocks %= at_once
            for _ in range(n_blocks):
                line = prefetch_lines(rows, line, i + block_bytes, places)
                own, offsets = gather(a + i, b + i, c + i, d + i, e + i, f + i, g + i, h + i)
                for p in range(0, n_groups, together):
                    sums = add_group(records, rows, i, p, own, offsets, sums)
                    records += RECORD_BYTES * n * together
                i += block_bytes
            put(y, apart, y_row, sums)

        return multiply

    return EightRows(_for_tokens(make), TOKENS)


def _eight(quants: Callable[..., Any]) -> Any:
    """Make the function that calls `quants`, which returns the quants of one row, for 8 rows."""

    @inlined
    def of_rows(rows: Any, i: int, p: int) -> Any:
        a, b, c, d, e, f, g, h = rows
        return (
            quants(raw(a), i, p), quants(raw(b), i, p), quants(raw(c), i, p), quants(raw(d), i, p),
            quants(raw(e), i, p), quants(raw(f), i, p), quants(raw(g), i, p), quants(raw(h), i, p),
        )  # fmt: skip

    return of_rows


def scales_of_rows(scales_of: Callable[..., Any], n_vectors: int = 1) -> Any:
    """Make a function that can be the argument `write` of `eight_rows_by_parts`.

    `scales_of(blocks, at)` returns a SIMD vector of scales of the block at byte `at`; if `n_vectors` is 2, also a
    vector of minima.
    """

    @inlined
    def write(to: int, rows: Any, i: int) -> None:
        a, b, c, d, e, f, g, h = rows
        of_a, of_b, of_c, of_d = scales_of(raw(a), i), scales_of(raw(b), i), scales_of(raw(c), i), scales_of(raw(d), i)
        of_e, of_f, of_g, of_h = scales_of(raw(e), i), scales_of(raw(f), i), scales_of(raw(g), i), scales_of(raw(h), i)
        if n_vectors == 2:
            _put_scales(to, of_a[0], of_b[0], of_c[0], of_d[0], of_e[0], of_f[0], of_g[0], of_h[0])
            to += 4 * ROWS * 16
            _put_scales(
                to, _minus(of_a[1]), _minus(of_b[1]), _minus(of_c[1]), _minus(of_d[1]), _minus(of_e[1]),
                _minus(of_f[1]), _minus(of_g[1]), _minus(of_h[1]),
            )  # fmt: skip
        else:
            _put_scales(to, of_a, of_b, of_c, of_d, of_e, of_f, of_g, of_h)

    return write


def eight_rows_by_parts(
    block_bytes: int, write: Callable[..., Any], quants: Callable[..., Any], stored: int = BYTES, kind: int = 0,
    minus: int = 0,
) -> EightRows:  # fmt: skip
    """Make the kernel of a format whose blocks have 256 weights.

    `write(to, rows, at)` writes the scales of the blocks at byte `at` of 8 rows to address `to`: scale 0 of all rows,
    then scale 1 of all rows, ..., then likewise the negated minima, if there are any.

    `quants(blocks, at, p)` returns quants 64 p to 64 p + 63 of the block at byte `at`: two vectors of 32 quants, in the
    form `stored` (BYTES, ...). For the forms NIBBLES_OF_64 and SIX_BITS_OF_128, `quants(p)` instead returns the
    byte offsets, in a block, of the parts of 16 bytes that store some quants: with NIBBLES_OF_64, quants 64 p to
    64 p + 63; with SIX_BITS_OF_128, quants 128 p to 128 p + 127.

    `kind` is HALVES, BIASED, their sum, or 0 (`panels.py`). `minus`, which is subtracted from every quant, is a
    multiple of 8; with HALVES, a multiple of 32.
    """
    n_parts = 8 // _BLOCKS.get(stored, 2)

    def make(n: int) -> Any:
        zeros, put = no_sums(n, floats_8), _put_products(n)
        part = _part(n, stored, kind, minus, quants)

        @jit
        def multiply(
            a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, n_columns: int, records: int, y: int,
            apart: int, y_row: int, ahead: int, scratch: int,
        ) -> None:  # fmt: skip
            rows, sums, line = (a, b, c, d, e, f, g, h), zeros(), 0
            places = far_and_near(n_columns // 256 * block_bytes, ahead)
            for i in range(0, n_columns // 256 * block_bytes, block_bytes):
                write(scratch, rows, i)
                stored_scales = hidden(scratch)
                # LLVM would unroll a loop whose count is a constant, so the count is hidden.
                for p in range(hidden(n_parts)):
                    line = prefetch_lines(rows, line, i + (p + 1) * block_bytes // n_parts, places)
                    sums = part(records, rows, i, p, stored_scales, sums)
                    records += 8 // n_parts * RECORD_BYTES * n
            put(y, apart, y_row, sums)

        return multiply

    return EightRows(_for_tokens(make), TOKENS)


def _scales_from(n: int, kind: int) -> Any:
    """Make the function that returns n scales, from scale i on, and n offsets (without BIASED, the scales again)."""
    load, is_biased, minima = _load_scales(n), kind & BIASED != 0, 16 if kind & HALVES else 8

    @jit
    def scales(stored: int, i: int) -> Any:
        own = load(stored, i)
        return own, load(stored, minima + i) if is_biased else own

    return scales


def _part(n: int, stored: int, kind: int, minus: int, quants: Any) -> Any:
    """Make the function that adds part p of a block (64 or 128 columns) of 8 rows to the products of n tokens."""
    step, rows_of, n_sums = _step(n, stored, kind, minus), _eight(quants), 2 if kind & HALVES else 1
    step_of_two, n_blocks = _step(n, stored, kind, minus, together=2), _BLOCKS.get(stored, 2)
    n_scales = n_blocks * n_sums
    scales_from = _scales_from(n_scales, kind)

    @inlined
    def at_once(records: int, rows: Any, i: int, p: int, scales: int, sums: Any) -> Any:
        own, offsets = scales_from(scales, n_scales * p)
        a, b, c, d, e, f, g, h = rows
        return step(records, (a + i, b + i, c + i, d + i, e + i, f + i, g + i, h + i), quants(p), own, offsets, sums)

    @inlined
    def twice(records: int, rows: Any, i: int, p: int, scales: int, sums: Any) -> Any:
        a, b, c, d, e, f, g, h = rows_of(rows, i, p)
        of_first, of_second = (
            (a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0]),
            (a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1]),
        )
        own, offsets = scales_from(scales, n_scales * p)
        if TOGETHER == 2 and n_sums == 1:
            return step_of_two(records, of_first + of_second, (), own, offsets, sums)
        sums = step(records, of_first, (), own[:n_sums], offsets[:n_sums], sums)
        return step(records + RECORD_BYTES * n, of_second, (), own[n_sums:], offsets[n_sums:], sums)

    return at_once if stored in _BLOCKS else twice


def _for_tokens(make: Callable[[int], Any]) -> Any:
    """Make the kernel for any number of tokens and rows; `make(n)` makes the kernel for n tokens and 8 rows."""
    one, two = make(1), make(2)

    @jit
    def multiply(
        n_tokens: int, rows: Any, last: Any, step: int, count: int, n_columns: int, records: int, y: int, apart: int,
        y_row: int, ahead: int, scratch: int,
    ) -> None:  # fmt: skip
        """Write `dot(row r of range i, token t)`, computed in fixed point, to `y[i * apart + r + t * y_row]`.

        Two rows of each of four ranges of matrix rows are multiplied at the same time (`fixed_gemv.py` has the reason).

        Args:
            n_tokens: 1 or more.
            rows: for each range, the address of its first row.
            last: for each range, the address of its matrix's last row, which is read in place of rows beyond the end.
            step: bytes from one row to the next.
            count: rows of each range. An odd count is rounded up, so y must have space for one more row.
            n_columns: columns of the rows, a multiple of 32 and of a block.
            records: address of the tokens' records.
            y: address of the products, float32.
            apart: distance in y, in elements, from one range to the next.
            y_row: distance in y, in elements, from one token to the next.
            ahead: prefetch distance in bytes.
            scratch: address of `format.FORMAT_SCRATCH` bytes of scratch memory.
        """
        for i in range(0, count, 2):
            now, then, to = i * step, (i + 1) * step, y + 4 * i
            a, b = min(rows[0] + now, last[0]), min(rows[0] + then, last[0])
            c, d = min(rows[1] + now, last[1]), min(rows[1] + then, last[1])
            e, f = min(rows[2] + now, last[2]), min(rows[2] + then, last[2])
            g, h = min(rows[3] + now, last[3]), min(rows[3] + then, last[3])
            for t in range(0, n_tokens, PAIR):
                own, place = records + t * (n_columns // 32) * RECORD_BYTES, to + 4 * t * y_row
                if n_tokens - t == 1:
                    one(a, b, c, d, e, f, g, h, n_columns, own, place, 4 * apart, 4 * y_row, ahead, scratch)
                else:
                    two(a, b, c, d, e, f, g, h, n_columns, own, place, 4 * apart, 4 * y_row, ahead, scratch)

    return multiply
