"""The tile of AMX for gemm in fixed point: 32 rows and up to 12 tokens, multiplied as bytes.

The sums of a block of 32 columns are exact integers, so the results have the same bits as those of `fixed_tile.py`. A
quant of a token is two signed bytes, its *digits*: `256 * high + low`. AMX's tile registers have 16 lines of 64 bytes.
One instruction multiplies a register of digits (per token a line, of which 32 columns take half) with a register of
weight quants (8 lines, each with 4 columns of 16 rows). The result is a register of sums (a line has the sums of a
token with 16 rows). So a block takes four instructions: the high and the low digits, each with the first and the last
16 rows. Then `256 * (sum of high) + (sum of low)`, times the scales of the row and of the token, is added to the
products y.

Formats with a scale for each 16 columns use the tile of `fixed_tile.py`. For these formats, AMX would be no faster: an
instruction takes as long for 16 columns as for 32, and twice as many sums would have to be added.

Sums can leave a tile register only through memory. AMX can begin a multiplication every 16 cycles, but a result
is ready only after 52. So the code is a pipeline: while 16 rows are multiplied, the sums of the other 16 rows are
written to memory. After each multiplication and each write, the code reads the sums of a quarter of the tokens from
memory, scales them, and adds them to y.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..build.vectors import call_llvm, everywhere
from ..formats.panels import BIASED, ROW_WORDS, ROWS, TILES, UNSIGNED
from .fixed_tile import DIGITS, SCALE, TOKEN_WORDS, TOKENS, TOTAL, load_words, word_address

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _LINE = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16), ir.VectorType(_I8, 64)
# Numbers of the tile registers: `_SUMS[side][digit]` (side: the first or the last 16 rows; digit: high or low),
# `_DIGITS[digit]` and `_QUANTS`.
_SUMS, _DIGITS, _QUANTS = ((0, 1), (2, 3)), (4, 5), 6
_QUARTER = TOKENS // 4


def _amx(builder: Any, name: str, *operands: Any) -> None:
    """Call an instruction of AMX. An operand that is a Python integer is the number of a tile register."""
    values = [ir.Constant(_I8, operand) if isinstance(operand, int) else operand for operand in operands]
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def _reserved(builder: Any, n_lines: int) -> Any:
    """Return the address of `n_lines` lines of 64 bytes on the stack."""
    with builder.goto_entry_block():  # `alloca_once` would also fill them with zeros
        place = builder.alloca(ir.ArrayType(_LINE, n_lines))
    place.align = 64
    return builder.bitcast(place, _I8.as_pointer())


# ---- the configuration of a thread ----


@intrinsic
def configure_tiles(typing: Any, n: Any) -> Any:
    """Set the shapes of this thread's tile registers, for n tokens. This takes 80 ns."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not TILES:
            return context.get_dummy_value()
        eight, half, whole = (ir.Constant(_I64, size) for size in (8, 32, 64))
        shapes = [(args[0], whole)] * 4 + [(args[0], half)] * 2 + [(eight, whole)]
        place = _reserved(builder, 1)
        builder.store(ir.Constant(_LINE, [1] + [0] * 63), builder.bitcast(place, _LINE.as_pointer()))
        for i, (lines, n_bytes) in enumerate(shapes):
            of_bytes = builder.bitcast(builder.gep(place, [ir.Constant(_I64, 16 + 2 * i)]), _I16.as_pointer())
            builder.store(builder.trunc(n_bytes, _I16), of_bytes)
            builder.store(builder.trunc(lines, _I8), builder.gep(place, [ir.Constant(_I64, 48 + i)]))
        _amx(builder, "ldtilecfg", place)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing: Any) -> Any:
    """Clear this thread's tile registers, so that the system need not save them when it switches threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if TILES:
            _amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


# ---- the tile ----


class _Tile:
    """Generates the code of the tile, which keeps the products y (tokens, sides, 16 rows) in SIMD registers.

    Side 0 is the first 16 rows, side 1 the last 16. Digit 0 is the high one, digit 1 the low one.
    """

    def __init__(self, builder: Any, n: Any, rows: Any, tokens: Any, kind: Any) -> None:
        self.builder, self.n, self.rows, self.tokens = builder, n, rows, tokens
        self.unsigned = _is_set(builder, kind, UNSIGNED)
        self.sums = [[_reserved(builder, TOKENS) for _ in range(2)] for _ in range(2)]
        self.y = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(2)] for _ in range(TOKENS)]

    def _has(self, t: int) -> Any:
        return self.builder.icmp_unsigned(">", self.n, ir.Constant(_I64, t))

    def copy_y(self, y: Any, y_row: Any, *, back: bool) -> None:
        """Copy the products of n tokens from address `y` to the registers, or with `back` from the registers to `y`."""
        builder = self.builder
        for t, own in enumerate(self.y):
            with builder.if_then(self._has(t)):
                row = word_address(builder, y, builder.mul(y_row, ir.Constant(_I64, t)))
                for side, place in enumerate(own):
                    if back:
                        to = builder.bitcast(word_address(builder, row, 16 * side), _FLOATS.as_pointer())
                        builder.store(builder.load(place), to).align = 4
                    else:
                        builder.store(load_words(builder, row, 16 * side, _FLOATS), place)

    def _block_of_rows(self, block: Any) -> Any:
        return word_address(self.builder, self.rows, self.builder.mul(block, ir.Constant(_I64, ROW_WORDS * ROWS)))

    def _words_of_tokens(self, block: Any, word: int) -> Any:
        """Return the address of a 4-byte word of the first token, for a block of columns; `word` is the word's number.

        The same word of the other tokens follows. For digits, `word` must be DIGITS (high) or DIGITS + 8 (low): here
        the 8 words of the first token are followed by the 8 words of the next token.
        """
        at = self.builder.add(self.builder.mul(block, ir.Constant(_I64, TOKEN_WORDS)), ir.Constant(_I64, word))
        return word_address(self.builder, self.tokens, self.builder.mul(at, self.n))

    def multiply(self, block: Any, side: int, digit: int) -> None:
        """Multiply 16 rows of a block with one digit of all tokens."""
        builder, to = self.builder, _SUMS[side][digit]
        if side == 0:
            digits = self._words_of_tokens(block, DIGITS + 8 * digit)
            _amx(builder, "tileloadd64", _DIGITS[digit], digits, ir.Constant(_I64, 32))
        if digit == 0:
            quants = word_address(builder, self._block_of_rows(block), 16 * side)
            _amx(builder, "tileloadd64", _QUANTS, quants, ir.Constant(_I64, 4 * ROWS))
        _amx(builder, "tilezero", to)
        with builder.if_else(self.unsigned) as (unsigned, signed):
            with unsigned:
                _amx(builder, "tdpbsud", to, _DIGITS[digit], _QUANTS)
            with signed:
                _amx(builder, "tdpbssd", to, _DIGITS[digit], _QUANTS)

    def write(self, side: int, digit: int) -> None:
        """Write the sums of 16 rows and one digit to memory."""
        _amx(self.builder, "tilestored64", _SUMS[side][digit], self.sums[side][digit], ir.Constant(_I64, 64))

    def add(self, block: Any, side: int, quarter: int, *, biased: bool) -> None:
        """Read the sums of 16 rows and a quarter of the tokens from memory, scale them, and add them to y."""
        builder, fma, rows = self.builder, "llvm.fma.v16f32", self._block_of_rows(block)
        scales, offsets = (load_words(builder, rows, (16 + i) * ROWS + 16 * side, _FLOATS) for i in range(2))
        token_scales, totals = (self._words_of_tokens(block, word) for word in (SCALE, TOTAL))

        def of_token(values: Any, t: int) -> Any:
            return everywhere(builder, load_words(builder, values, t, _F32), 16)

        first = _QUARTER * quarter
        with builder.if_then(self._has(first)):
            for t in range(first, first + _QUARTER):
                high, low = (load_words(builder, sums, 16 * t, _INTS) for sums in self.sums[side])
                whole = builder.add(builder.shl(high, ir.Constant(_INTS, [8] * 16)), low)
                y, factor = builder.load(self.y[t][side]), builder.fmul(scales, of_token(token_scales, t))
                if biased:
                    y = call_llvm(builder, fma, _FLOATS, [offsets, of_token(totals, t), y])
                y = call_llvm(builder, fma, _FLOATS, [builder.sitofp(whole, _FLOATS), factor, y])
                builder.store(y, self.y[t][side])

    def run(self, n_blocks: Any, *, biased: bool) -> None:
        """Multiply all blocks: while the sums of a block are added to y, the next block is multiplied."""
        builder, order = self.builder, [(side, digit) for side in range(2) for digit in range(2)]
        for side, digit in order:
            self.multiply(ir.Constant(_I64, 0), side, digit)
        for digit in range(2):
            self.write(0, digit)
        with cgutils.for_range(builder, n_blocks) as loop:
            after = builder.add(loop.index, ir.Constant(_I64, 1))
            has_more = builder.icmp_unsigned("<", after, n_blocks)
            for side, digit in order:
                with builder.if_then(has_more, likely=True):
                    self.multiply(after, side, digit)
                self.add(loop.index, side, 2 * digit, biased=biased)
                if side == 0:
                    self.write(1, digit)
                else:
                    with builder.if_then(has_more, likely=True):
                        self.write(0, digit)
                self.add(loop.index, side, 2 * digit + 1, biased=biased)


def _is_set(builder: Any, kind: Any, bit: int) -> Any:
    return builder.icmp_unsigned("!=", builder.and_(kind, ir.Constant(_I64, bit)), ir.Constant(_I64, 0))


@intrinsic
def multiply_tiles(typing: Any, n: Any, rows: Any, tokens: Any, n_blocks: Any, y: Any, y_row: Any, kind: Any) -> Any:
    """Do with AMX what `fixed_tile.multiply_panels` does, for a format that has a scale for each 32 columns.

    `configure_tiles` must have been called with n or n + 1: it is called once per chunk, for the largest group of
    tokens, and the other groups may have one token less.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not TILES:
            return context.get_dummy_value()
        n, rows, tokens, n_blocks, y, y_row, kind = args
        rows, tokens, y = (builder.inttoptr(a, _I8.as_pointer()) for a in (rows, tokens, y))
        tile = _Tile(builder, n, rows, tokens, kind)
        tile.copy_y(y, y_row, back=False)
        with builder.if_else(_is_set(builder, kind, BIASED)) as (with_offsets, without):
            with with_offsets:
                tile.run(n_blocks, biased=True)
            with without:
                tile.run(n_blocks, biased=False)
        tile.copy_y(y, y_row, back=True)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, i), generate
