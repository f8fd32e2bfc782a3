"""Register tiles for gemm in fixed point (`--activations i16`): integer products of int16 quants, with scales.

`fixed_numpy.py` defines the arithmetic. The sum of a block of 32 columns (or of 16, if a format has a scale for each
16) is an exact int32, so the order of its terms is free. Blocks are added to the output in the order of columns. So a
tile may have any shape, and all processors give the same bits.

A SIMD lane is a row of the matrix. Weight rows are expanded to panels of ROWS rows (`formats/panels.py`), and tokens
are packed into panels of at most TOKENS tokens (`pack`). A tile multiplies one panel of rows with one panel of tokens.
Panels consist of words of 4 bytes. For each block of 32 columns, a panel has word 0 of all rows or tokens, then word 1
of all, and so on. The words are:

- of a row: 16 words of quants, the scale, the offset. If the format has a scale for each 16 columns (HALVES), the scale
  and the offset of the last 16 columns follow.
- of a token: 16 words of quants, the scale, the total, the totals of the first and of the last 16 columns, and the sum
  of the quants as an integer. A total is the token's scale times a sum of its quants.

There are two forms of quants:

- *pairs*: a word is two int16, and one instruction multiplies two columns of all rows of a register.
- *quads*, on arm64 with sdot: a word is four int8. Of a row, only the first 8 words are used. A quant of a token is two
  int8, `256 * high + low`: the first 8 words of a token have the high bytes, the last 8 words the low bytes.

With AMX (`fixed_amx.py`), rows are pairs if their format has HALVES, else quads. Tokens are pairs, followed by the
bytes (*digits*) that AMX multiplies with quads: 32 high bytes of each token, then 32 low bytes of each token.

Pairs are multiplied by inline assembly, for eight pairs of columns at a time (`_pairs`): code that LLVM generates is a
quarter slower, or keeps sums in memory. If the processor lacks the instructions for this, LLVM's operations multiply
the pairs (`_plain_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.memory import floats, ints
from ..build.vectors import call_llvm, everywhere, get, lanes, pair_dot, put, register_lanes
from ..formats.panels import BIASED, HALVES, QUADS, ROW_WORDS, ROWS, TILES, UNSIGNED

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WIDTH = register_lanes()
# The most tokens of a tile, for registers of 16, 8 or 4 lanes. Sums take 24 of the 32 registers of AVX-512 and NEON, 12
# of the 16 of AVX2; NEON has separate sums for high and low bytes.
TOKENS = {16: 12, 8: 6, 4: 3}[_WIDTH]
# Positions of a token's words in a block (listed above), and the number of these words. With AMX the number is a
# multiple of 8, so that digits are at multiples of 32 bytes: AMX loads 32 bytes that cross cache lines at half speed.
DIGITS = 16
SCALE = DIGITS + (16 if TILES else 0)
TOTAL, HALF_TOTALS, INT_TOTAL, TOKEN_WORDS = SCALE + 1, SCALE + 2, SCALE + 4, SCALE + (8 if TILES else 5)
_REGISTERS = ROWS // _WIDTH

# The type of a step: (builder, number of tokens, rows, tokens, half, sums) -> new sums. A step adds the products of one
# half of a block to the sums, or to zeros if `sums` is None.
Step = Callable[[Any, int, Any, Any, int, "list[Any] | None"], list[Any]]


def word_address(builder: Any, base: Any, n_words: Any) -> Any:
    """Return the address that is `n_words` words after `base`, a pointer to bytes."""
    offset = ir.Constant(_I64, 4 * n_words) if isinstance(n_words, int) else builder.shl(n_words, ir.Constant(_I64, 2))
    return builder.gep(base, [offset])


def load_words(builder: Any, base: Any, n_words: Any, kind: Any) -> Any:
    """Load a value of type `kind`, `n_words` words after a pointer to bytes."""
    loaded = builder.load(builder.bitcast(word_address(builder, base, n_words), kind.as_pointer()))
    loaded.align = 4
    return loaded


# ---- the products of half a block ----


def _pairs(builder: Any, n: int, rows: Any, tokens: Any, half: int, sums: list[Any] | None) -> list[Any]:
    """Add the products of 8 pairs of columns, in inline assembly.

    AVX2 has four registers besides those of the sums: two for rows, one for a token, and one for products.
    """
    dot, kind = pair_dot(), ir.VectorType(_I32, _WIDTH)
    adds, move = "vpdp" in dot, "vmovdqu" if _WIDTH == 8 else "vmovdqu32"
    n_sums, n_own = n * _REGISTERS, _REGISTERS + (1 if adds else 2)
    own = [f"${n_sums + i}" for i in range(n_own)]
    weights, x, product = own[:_REGISTERS], own[_REGISTERS], own[-1]
    from_rows, from_tokens = f"(${n_sums + n_own})", f"(${n_sums + n_own + 1})"
    text = []
    for p in range(8 * half, 8 * half + 8):
        text += [f"{move} {4 * (p * ROWS + j * _WIDTH)}{from_rows}, {w}" for j, w in enumerate(weights)]
        for t in range(n):
            own_sums = [f"${t * _REGISTERS + j}" for j in range(_REGISTERS)]
            text.append(f"vpbroadcastd {4 * (p * n + t)}{from_tokens}, {x}")
            if sums is None and p == 8 * half:
                text += [f"vpmaddwd {w}, {x}, {s}" for w, s in zip(weights, own_sums, strict=True)]
            elif adds:
                text += [f"{dot} {w}, {x}, {s}" for w, s in zip(weights, own_sums, strict=True)]
            else:
                text += [f"{dot} {weights[0]}, {x}, {product}", f"{dot} {weights[1]}, {x}, {x}"]
                text += [f"vpaddd {product}, {own_sums[0]}, {own_sums[0]}", f"vpaddd {x}, {own_sums[1]}, {own_sums[1]}"]
    register = "v" if _WIDTH == 16 else "x"
    given = sums or []
    constraints = [f"={register}"] * n_sums + [f"=&{register}"] * n_own + ["r", "r"]
    constraints += [str(i) for i in range(len(given))]
    found = ir.LiteralStructType([kind] * (n_sums + n_own))
    bytes_ = _I8.as_pointer()
    function = ir.FunctionType(found, [bytes_, bytes_, *[kind] * len(given)])
    all_ = ",".join([*constraints, "~{memory}"])
    result = builder.asm(function, "\n\t".join(text), all_, [rows, tokens, *given], side_effect=True)
    return [builder.extract_value(result, i) for i in range(n_sums)]


def _plain_pairs(builder: Any, n: int, rows: Any, tokens: Any, half: int, sums: list[Any] | None) -> list[Any]:
    """Add the products of 8 pairs of columns, by LLVM's multiplications of int32."""
    kind = ir.VectorType(_I32, _WIDTH)
    sums = list(sums) if sums else [ir.Constant(kind, None)] * (n * _REGISTERS)

    def both(word: Any) -> tuple[Any, Any]:
        sixteen = ir.Constant(word.type, 16 if word.type is _I32 else [16] * _WIDTH)
        return builder.ashr(builder.shl(word, sixteen), sixteen), builder.ashr(word, sixteen)

    for p in range(8 * half, 8 * half + 8):
        weights = [both(load_words(builder, rows, p * ROWS + j * _WIDTH, kind)) for j in range(_REGISTERS)]
        for t in range(n):
            low, high = (everywhere(builder, x, _WIDTH) for x in both(load_words(builder, tokens, p * n + t, _I32)))
            for j, (first, second) in enumerate(weights):
                i = t * _REGISTERS + j
                sums[i] = builder.add(sums[i], builder.mul(first, low))
                sums[i] = builder.add(sums[i], builder.mul(second, high))
    return sums


def _quads(builder: Any, n: int, rows: Any, tokens: Any, half: int, sums: list[Any] | None) -> list[Any]:
    """Add the products of 4 quads of columns, by sdot. `sums` are the sums with high bytes, then with low bytes."""
    kind, bytes_ = ir.VectorType(_I32, 4), ir.VectorType(_I8, 16)
    name, low = "llvm.aarch64.neon.sdot.v4i32.v16i8", n * _REGISTERS
    sums = list(sums) if sums else [ir.Constant(kind, None)] * (2 * low)
    for q in range(4 * half, 4 * half + 4):
        weights = [load_words(builder, rows, q * ROWS + j * 4, bytes_) for j in range(_REGISTERS)]
        for t in range(n):
            digits = [load_words(builder, tokens, at * n + t, _I32) for at in (q, 8 + q)]
            spread = [builder.bitcast(everywhere(builder, digit, 4), bytes_) for digit in digits]
            for j, w in enumerate(weights):
                for first, x in zip((0, low), spread, strict=True):
                    i = first + t * _REGISTERS + j
                    sums[i] = call_llvm(builder, name, kind, [sums[i], w, x])
    return sums


# ---- the tile ----


class _Tile:
    """The shape, the addresses and the kind of format of one tile, for the functions that generate its code."""

    def __init__(self, builder: Any, n: int, rows: Any, tokens: Any, y: Any, y_row: Any, kind: Any) -> None:
        self.builder, self.n, self.rows, self.tokens = builder, n, rows, tokens
        self.y = [builder.gep(y, [builder.mul(y_row, ir.Constant(_I64, 4 * t))]) for t in range(n)]
        self.halves, self.biased, self.unsigned = (
            builder.icmp_unsigned("!=", builder.and_(kind, ir.Constant(_I64, bit)), ir.Constant(_I64, 0))
            for bit in (HALVES, BIASED, UNSIGNED)
        )

    def put(self, sums: list[Any], scales: Any, totals: Any) -> None:
        """Add the sums, times the scales of rows and tokens, to y. If rows have offsets, also add offsets times totals.

        The rows' scales begin at word `scales` of the block of rows, the tokens' totals at word `totals` of the block
        of tokens.
        """
        with self.builder.if_else(self.biased) as (with_offsets, without):
            with with_offsets:
                self._put(sums, scales, totals)
            with without:
                self._put(sums, scales, None)

    def _put(self, sums: list[Any], scales: Any, totals: Any | None) -> None:
        builder, n, kind = self.builder, self.n, ir.VectorType(_F32, _WIDTH)
        fma, base = f"llvm.fma.v{_WIDTH}f32", word_address(builder, self.rows, scales)
        for t in range(n):
            scale = everywhere(builder, load_words(builder, self.tokens, SCALE * n + t, _F32), _WIDTH)
            if totals is not None:
                place = word_address(builder, self.tokens, totals)
                total = everywhere(builder, load_words(builder, place, t, _F32), _WIDTH)
            for j in range(_REGISTERS):
                at, whole = j * _WIDTH, builder.sitofp(sums[t * _REGISTERS + j], kind)
                y = load_words(builder, self.y[t], at, kind)
                if totals is not None:
                    y = call_llvm(builder, fma, kind, [load_words(builder, base, ROWS + at, kind), total, y])
                factor = builder.fmul(load_words(builder, base, at, kind), scale)
                place = builder.bitcast(word_address(builder, self.y[t], at), kind.as_pointer())
                builder.store(call_llvm(builder, fma, kind, [whole, factor, y]), place).align = 4


def _joined(tile: _Tile, sums: list[Any]) -> list[Any]:
    """Return one sum for each token and register of rows; with quads the sum is `256 * high + low`."""
    builder, n_sums = tile.builder, tile.n * _REGISTERS
    if len(sums) == n_sums:
        return sums
    eight = ir.Constant(sums[0].type, [8] * _WIDTH)
    found = [builder.add(builder.shl(h, eight), low) for h, low in zip(sums[:n_sums], sums[n_sums:], strict=True)]
    # A panel stores an unsigned quant minus 128, as a signed byte. So add 128 times the sum of the token's quants.
    offset = builder.select(tile.unsigned, ir.Constant(_I32, 128), ir.Constant(_I32, 0))
    for t in range(tile.n):
        total = load_words(builder, tile.tokens, INT_TOTAL * tile.n + t, _I32)
        missing = everywhere(builder, builder.mul(total, offset), _WIDTH)
        for j in range(_REGISTERS):
            found[t * _REGISTERS + j] = builder.add(found[t * _REGISTERS + j], missing)
    return found


def _block(tile: _Tile, step: Step, places: list[Any]) -> None:
    """Multiply one block of 32 columns. `places` are stack slots for the sums; LLVM turns the slots into registers."""
    builder, n = tile.builder, tile.n

    def half(which: int, before: list[Any] | None) -> None:
        for place, value in zip(places, step(builder, n, tile.rows, tile.tokens, which, before), strict=True):
            builder.store(value, place)

    def word(by_halves: int, whole: int) -> Any:
        return builder.select(tile.halves, ir.Constant(_I64, by_halves), ir.Constant(_I64, whole))

    half(0, None)
    with builder.if_else(tile.halves) as (by_halves, whole):
        with by_halves:
            first = [builder.load(place) for place in places]
            tile.put(_joined(tile, first), ir.Constant(_I64, 16 * ROWS), ir.Constant(_I64, HALF_TOTALS * n))
            half(1, None)
        with whole:
            half(1, [builder.load(place) for place in places])
    last = _joined(tile, [builder.load(place) for place in places])
    tile.put(last, word(18 * ROWS, 16 * ROWS), word((HALF_TOTALS + 1) * n, TOTAL * n))


def tile_of(n: int, step: Step) -> Any:
    """Return the function that multiplies a tile of ROWS rows and n tokens, with products by `step`."""

    @intrinsic
    def tile(typing: Any, rows: Any, tokens: Any, n_blocks: Any, y: Any, y_row: Any, kind: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if n > TOKENS:
                return context.get_dummy_value()
            rows, tokens, n_blocks, y, y_row, kind = args
            rows, tokens, y = (builder.inttoptr(a, _I8.as_pointer()) for a in (rows, tokens, y))
            n_sums = n * _REGISTERS * (2 if step is _quads else 1)
            places = [cgutils.alloca_once(builder, ir.VectorType(_I32, _WIDTH)) for _ in range(n_sums)]
            with cgutils.for_range(builder, n_blocks) as loop:
                own_rows, own_tokens = (
                    word_address(builder, base, builder.mul(loop.index, ir.Constant(_I64, size)))
                    for base, size in ((rows, ROW_WORDS * ROWS), (tokens, TOKEN_WORDS * n))
                )
                _block(_Tile(builder, n, own_rows, own_tokens, y, y_row, kind), step, places)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i), generate

    return tile


# The step for the processor that Numba compiles for.
STEP: Step = _quads if QUADS else _pairs if pair_dot() else _plain_pairs
if STEP is _pairs:
    binding.initialize_native_asmparser()


def choice(n: int, step: Step) -> Any:
    """Return a function that multiplies a panel of rows with a panel of 1 to n tokens, by the tile for their number."""
    own, fewer = tile_of(n, step), choice(n - 1, step) if n > 1 else None

    @jit
    def multiply(n_tokens: int, rows: int, tokens: int, n_blocks: int, y: int, y_row: int, kind: int) -> None:
        """Add the products of `n_blocks` blocks of 32 columns to the float `y[t * y_row + r]`, for row r and token t.

        `rows` and `tokens` are the addresses of the first blocks to multiply in a panel of rows and in a panel of
        `n_tokens` tokens; y is an address, too. `kind` is the kind of the format (`formats/panels.py`).
        """
        if fewer is None or n_tokens == n:
            own(rows, tokens, n_blocks, y, y_row, kind)
        else:
            fewer(n_tokens, rows, tokens, n_blocks, y, y_row, kind)

    return multiply


multiply_panels = choice(TOKENS, STEP)


# ---- panels of tokens ----


@intrinsic
def _pack_block(typing: Any, quants: Any, to: Any, t: Any, n: Any) -> Any:
    """Write 32 int16 quants of token t, from address `quants`, to the block at address `to` of a panel of n tokens.

    With AMX, also write their digits. A pair is columns 4 i and 4 i + 2, or 4 i + 1 and 4 i + 3, as in a panel of rows.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        quants, to, t, n = args
        kind, bytes_ = ir.VectorType(_I16, 32), ir.VectorType(_I8, 32)
        found = builder.load(builder.inttoptr(quants, kind.as_pointer()))
        found.align = 2
        rounded = builder.add(found, ir.Constant(kind, [128] * 32))
        high = builder.trunc(builder.ashr(rounded, ir.Constant(kind, [8] * 32)), bytes_)
        low = builder.trunc(found, bytes_)
        if QUADS:
            packed = lanes(builder, high, low, list(range(64)))
        else:
            packed = lanes(builder, found, found, [4 * q + c for q in range(8) for c in (0, 2, 1, 3)])
        if TILES:
            place = builder.add(to, builder.mul(n, ir.Constant(_I64, 4 * DIGITS)))
            digits = builder.inttoptr(place, bytes_.as_pointer())
            builder.store(high, builder.gep(digits, [t])).align = 4
            builder.store(low, builder.gep(digits, [builder.add(t, n)])).align = 4
        words = builder.bitcast(packed, ir.VectorType(_I32, 16))
        step, to = builder.shl(n, ir.Constant(_I64, 2)), builder.add(to, builder.shl(t, ir.Constant(_I64, 2)))
        for i in range(16):
            word = builder.extract_element(words, ir.Constant(_I32, i))
            builder.store(word, builder.inttoptr(to, _I32.as_pointer())).align = 4
            to = builder.add(to, step)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i), generate


@intrinsic
def sums_of_halves(typing: Any, quants: Any) -> Any:
    """Return two sums: of the first 16 and of the last 16 of the 32 int16 at address `quants`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, found = ir.VectorType(_I16, 16), []
        for half in range(2):
            place = builder.add(args[0], ir.Constant(_I64, 32 * half))
            loaded = builder.load(builder.inttoptr(place, kind.as_pointer()))
            loaded.align = 2
            wide = builder.sext(loaded, ir.VectorType(_I32, 16))
            found.append(call_llvm(builder, "llvm.vector.reduce.add.v16i32", _I32, [wide]))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.int32, 2)(types.int64), generate


@jit
def pack(quants: int, scales: int, n: int, n_blocks: int, to: int) -> None:
    """Pack the int16 quants (n, 32 * n_blocks) and scales (n, n_blocks) of n tokens into a panel at address `to`."""
    factors = floats(scales)
    for b in range(n_blocks):
        place = to + 4 * TOKEN_WORDS * n * b
        words, whole = floats(place), ints(place)
        for t in range(n):
            at, scale = quants + 64 * (t * n_blocks + b), get(factors, t * n_blocks + b)
            low, high = sums_of_halves(at)
            _pack_block(at, place, t, n)
            put(words, SCALE * n + t, scale)
            put(words, TOTAL * n + t, np.float32(low + high) * scale)
            put(words, HALF_TOTALS * n + t, np.float32(low) * scale)
            put(words, (HALF_TOTALS + 1) * n + t, np.float32(high) * scale)
            whole[INT_TOTAL * n + t] = low + high
