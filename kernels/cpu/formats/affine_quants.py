"""Load scales and packed quants of MLX's affine formats into vectors; made per type of scale and number of bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import LANES
from ..build.vectors import (
    call_llvm,
    element_address,
    everywhere,
    has_multishift,
    load_half_splat,
    register_lanes,
    vector,
)
from .quants import both, lanes, load_uint8, right

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def scale_and_bias(kind: str) -> Any:
    """Return the function that loads two floats from a byte offset on, each into every lane: "f16", "bf16" or "f32"."""
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
    """Load two bfloat16, the upper halves of float32, as one word: one load, and one operation for each."""

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
    address = element_address(context, builder, signature.args[0], *args)
    word = builder.load(builder.bitcast(address, _I32.as_pointer()))
    word.align = 1
    return everywhere(builder, word)


def pair_of(bits: int, *, clean: bool) -> Any:
    """Return the function that loads 32 quants of `bits` bits from a byte offset on into two vectors, one per word.

    Args:
        bits: 2 to 8. Quants of 4 bits lie in halves (`kernels/blocks.py`), all others one after the other.
        clean: whether the upper bits of the words must be zeros.
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
    """Return the function that loads 16 quants."""
    unpack = _by_multishift if bits * LANES <= 64 and has_multishift() else _by_bytes

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = element_address(context, builder, signature.args[0], *args)
            packed = builder.load(builder.bitcast(address, ir.VectorType(_I8, 2 * bits).as_pointer()))
            packed.align = 1
            if bits == 8:
                return builder.zext(packed, _INTS)
            words = unpack(builder, packed, bits)
            return builder.and_(words, ir.Constant(_INTS, [(1 << bits) - 1] * LANES)) if clean else words

        return lanes(data, types.int64), generate

    return load


def _by_bytes(builder: Any, packed: Any, bits: int) -> Any:
    """Copy the one or two bytes that have a quant into its word, and shift them."""
    firsts, shifts = zip(*(divmod(i * bits, 8) for i in range(LANES)), strict=True)
    places = [p for byte in firsts for p in (byte, min(byte + 1, 2 * bits - 1), byte, byte)]
    mask = ir.Constant(ir.VectorType(_I32, 4 * LANES), places)
    spread = builder.shuffle_vector(packed, packed, mask)
    return builder.lshr(builder.bitcast(spread, _INTS), ir.Constant(_INTS, list(shifts)))


def _by_multishift(builder: Any, packed: Any, bits: int) -> Any:
    """Take the 8 bits from each quant's first bit on with one instruction; all quants are in 64 bits."""
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
    """`scale * q + bias`, rounded once, for the quant q in the lowest 4 bits of each word.

    All lanes of `scale` are equal, and so are all lanes of `bias`. With AVX-512 q is an index into a register of all 16
    results, which is computed once per group.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, scale, bias = args
        name = f"llvm.fma.v{LANES}f32"
        if register_lanes() == LANES:
            every = ir.Constant(_VECTOR, [float(q) for q in range(LANES)])
            table = call_llvm(builder, name, _VECTOR, [scale, every, bias])
            return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [table, words])
        quants = builder.sitofp(builder.and_(words, ir.Constant(_INTS, [15] * LANES)), _VECTOR)
        return call_llvm(builder, name, _VECTOR, [scale, quants, bias])

    return vector(lanes, vector, vector), generate


@intrinsic
def floats_of_words(typing: Any, words: Any) -> Any:
    """Return 16 words as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _VECTOR)

    return vector(lanes), generate
