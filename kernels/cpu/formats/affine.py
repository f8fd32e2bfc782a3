"""CPU kernels of MLX's affine formats: unpack groups of 32, 64 or 128 weights to float32.

Each format (bits, group size, type of scales) is compiled when a model first needs it. A block is a group: a scale and
a bias (float16, bfloat16 or float32), then quants q of 2, 3, 4, 5, 6 or 8 bits in the order of `kernels/blocks.py`. A
weight is `scale * q + bias`; the product and the sum are each rounded. For scales of 16 bits the product is exact, so
an fma gives the same weight. The NumPy reference is in `blocks_numpy.py`. Below, a word is a lane of 32 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import LANES
from ..build.library import affine_format
from ..build.vectors import (
    add,
    call_llvm,
    everywhere,
    fma,
    has_multishift,
    load_as,
    load_half_splat,
    mul,
    vector,
)
from .fixed_rows import NIBBLES, UNSIGNED_BYTES, eight_rows_of_groups, load_16
from .format import ONE_PANEL, TWO_PANELS
from .panels import BIASED, UNSIGNED, Panel, load_32, load_nibbles, narrowed, panel_of_groups
from .quants import both, fma_of_4_bits, lanes, load_uint8, right
from .rows import dequantize_pieces, four_rows_of_groups
from .scales import scales_of
from .sums import WIDE

# ---- load scales and packed quants into SIMD vectors, for each type of scale and number of bits ----

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def scale_and_bias(kind: str) -> Any:
    """Return the function that loads a scale and a bias of type `kind` ("f16", "bf16", "f32"), each into every lane."""
    if kind == "bf16":
        return _two_upper_halves

    @jit
    def load(data: Any, at: Any) -> Any:
        if kind == "f16":
            return load_half_splat(data, at), load_half_splat(data, at + 2)
        return _load_float_splat(data, at), _load_float_splat(data, at + 4)

    return load


@intrinsic
def _two_upper_halves(typing: Any, data: Any, at: Any) -> Any:
    """Load two bfloat16 as float32, each into every lane, with one load of 32 bits and one operation per number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        both = _load_word(context, builder, signature, args)
        first = builder.shl(both, ir.Constant(_INTS, [16] * LANES))
        second = builder.and_(both, ir.Constant(_INTS, [0xFFFF0000] * LANES))
        found = [builder.bitcast(words, _VECTOR) for words in (first, second)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(vector, 2)(data, types.int64), generate


@intrinsic
def _load_float_splat(typing: Any, data: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_load_word(context, builder, signature, args), _VECTOR)

    return vector(data, types.int64), generate


def _load_word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return everywhere(builder, load_as(context, builder, signature, args, _I32))


def pair_of(bits: int, *, clean: bool) -> Any:
    """Return the function that loads the 32 quants at a byte offset into two vectors of 16 words, one quant per word.

    With `clean`, all bits above the quant in its word are zeros; without it, they are arbitrary.
    """

    @jit
    def halves(data: Any, at: Any) -> Any:
        words = load_uint8(data, at)
        return (both(words, 15) if clean else words), right(words, 4)

    if bits == 4:
        return halves
    load = _quants_of(bits, clean=clean)

    @jit
    def pair(data: Any, at: Any) -> Any:
        return load(data, at), load(data, at + 2 * bits)

    return pair


def _quants_of(bits: int, *, clean: bool) -> Any:
    """Return the function that loads 16 quants of `bits` bits into a vector of 16 words."""
    unpack = _by_multishift if bits * LANES <= 64 and has_multishift() else _by_bytes

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            packed = load_as(context, builder, signature, args, ir.VectorType(_I8, 2 * bits))
            if bits == 8:
                return builder.zext(packed, _INTS)
            words = unpack(builder, packed, bits)
            return builder.and_(words, ir.Constant(_INTS, [(1 << bits) - 1] * LANES)) if clean else words

        return lanes(data, types.int64), generate

    return load


def _by_bytes(builder: Any, packed: Any, bits: int) -> Any:
    """Return 16 quants as words: copy the one or two bytes that have a quant's bits to a word, and shift the word."""
    firsts, shifts = zip(*(divmod(i * bits, 8) for i in range(LANES)), strict=True)
    places = [p for byte in firsts for p in (byte, min(byte + 1, 2 * bits - 1), byte, byte)]
    mask = ir.Constant(ir.VectorType(_I32, 4 * LANES), places)
    spread = builder.shuffle_vector(packed, packed, mask)
    return builder.lshr(builder.bitcast(spread, _INTS), ir.Constant(_INTS, list(shifts)))


def _by_multishift(builder: Any, packed: Any, bits: int) -> Any:
    """Return 16 quants as words, with AVX-512 VBMI: one instruction extracts 8 bits for each quant from 64 bits."""
    kind = ir.VectorType(_I8, 4 * LANES)
    places = [p if p < 2 * bits else 0 for p in range(8)]
    eight = builder.shuffle_vector(packed, packed, ir.Constant(ir.VectorType(_I32, 8), places))
    whole = everywhere(builder, builder.bitcast(eight, ir.IntType(64)), LANES // 2)
    firsts = ir.Constant(kind, [bit for i in range(LANES) for bit in [i * bits] * 4])
    name = "llvm.x86.avx512.pmultishift.qb.512"
    found = call_llvm(builder, name, kind, [firsts, builder.bitcast(whole, kind)])
    return builder.bitcast(found, _INTS)


@intrinsic
def multiply_add_table(typing: Any, words: Any, scale: Any, bias: Any) -> Any:
    """Return `scale * q + bias` for the quant q in the lowest 4 bits of each word (`fma_of_4_bits`)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fma_of_4_bits(builder, *args)

    return vector(lanes, vector, vector), generate


@intrinsic
def floats_of_words(typing: Any, words: Any) -> Any:
    """Convert 16 integers to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _VECTOR)

    return vector(lanes), generate


SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
# Number of weights of a row that gemv unpacks at a time. With more, the weights of four rows would not fit into the
# registers.
_PIECE = 64 if WIDE else 32


class Kernels(NamedTuple):
    """The sizes and kernels of an affine format, under the names that they have in the modules of other formats."""

    BLOCK: int
    BLOCK_BYTES: int
    MOST: int
    four_rows: Any
    dequantize: Any
    panel: Panel
    eight_rows: Any


def kernels(name: str) -> Kernels:
    """Return the kernels of a format, such as "affine4_g64_bf16"; raise ValueError if no format has this name."""
    found = affine_format(name)
    if found is None:
        raise ValueError(f"expected the name of an affine format, found {name!r}")
    bits, group, scale = found
    block_bytes, piece = 2 * SCALE_BYTES[scale] + group * bits // 8, min(_PIECE, group)
    four_rows = four_rows_of_groups(group, block_bytes, piece, weights_of(bits, scale, piece))
    dequantize = dequantize_pieces(group, block_bytes, weights_of(bits, scale, 32))
    kind = BIASED | UNSIGNED if bits == 8 else BIASED
    scales = scales_of(scale, has_offset=True)
    panel = panel_of_groups(group, block_bytes, scales, _quants_32(bits, scale), kind)
    stored = NIBBLES if bits == 4 else UNSIGNED_BYTES
    eight_rows = eight_rows_of_groups(group, block_bytes, scales, _packed(bits, scale), stored, BIASED)
    return Kernels(group, block_bytes, TWO_PANELS if bits == 8 else ONE_PANEL, four_rows, dequantize, panel, eight_rows)


def _quants_32(bits: int, scale: str) -> Any:
    """Return the function that loads quants 32 p to 32 p + 31 of the block at byte `at`, one quant per byte."""
    quants_at, load_pair = 2 * SCALE_BYTES[scale], pair_of(bits, clean=True)

    @jit
    def quants(blocks: Any, at: int, p: int) -> Any:
        place = at + quants_at + 4 * bits * p
        if bits == 4:
            return load_nibbles(blocks, place)
        if bits == 8:
            return load_32(blocks, place)
        low, high = load_pair(blocks, place)
        return narrowed(low, high)

    return quants


def _packed(bits: int, scale: str) -> Any:
    """Make the function that loads quants 32 p to 32 p + 31 for `eight_rows`: 4-bit quants packed, others in bytes."""
    quants_at = 2 * SCALE_BYTES[scale]

    @jit
    def packed(blocks: Any, at: int, p: int) -> Any:
        return load_16(blocks, at + quants_at + 16 * p)

    return packed if bits == 4 else _quants_32(bits, scale)


def weights_of(bits: int, scale: str, piece: int) -> Any:
    """Return the function that loads `piece` weights of a block: 32 into two vectors, or 64 into four."""
    # The bits above a 4-bit quant are cleared only with float32 scales. With other scales, `_combine` returns
    # `multiply_add_table`, which ignores these bits.
    quants = pair_of(bits, clean=bits != 4 or scale == "f32")
    combine, scale_of, quants_at = _combine(bits, scale), scale_and_bias(scale), 2 * SCALE_BYTES[scale]

    @jit
    def two(blocks: Any, at: int, p: int) -> Any:
        """Return weights 32 p to 32 p + 31 of the block at byte `at`."""
        (scale, bias), (low, high) = scale_of(blocks, at), quants(blocks, at + quants_at + 4 * bits * p)
        return combine(low, scale, bias), combine(high, scale, bias)

    @jit
    def four(blocks: Any, at: int, p: int) -> Any:
        """Return weights 64 p to 64 p + 63 of the block at byte `at`."""
        return (*two(blocks, at, 2 * p), *two(blocks, at, 2 * p + 1))

    return two if piece == 32 else four


def _combine(bits: int, scale: str) -> Any:
    """Return the function that computes `scale * q + bias` for 16 quants q."""

    @jit
    def fused(quants: Any, scale: Any, bias: Any) -> Any:
        return fma(scale, floats_of_words(quants), bias)

    @jit
    def rounded_twice(quants: Any, scale: Any, bias: Any) -> Any:
        return add(mul(scale, floats_of_words(quants)), bias)

    if scale == "f32":
        return rounded_twice
    return multiply_add_table if bits <= 4 else fused
