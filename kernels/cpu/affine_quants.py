"""Load scales and packed quants of MLX's affine formats into vectors; made for each type of scale and number of bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.layout import LANES
from kernels.cpu.quants import lanes
from kernels.cpu.vectors import element_address, everywhere, load_half_splat, vector

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def float_splat(kind: str) -> Any:
    """Return the function that loads the float at a byte offset into every lane: "f16", "bf16" or "f32"."""
    if kind == "f16":
        return load_half_splat

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = _I32 if kind == "f32" else _I16
            address = element_address(context, builder, signature.args[0], *args)
            bits = builder.load(builder.bitcast(address, word.as_pointer()))
            bits.align = 1
            if kind == "bf16":  # the upper half of a float32
                bits = builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16))
            return builder.bitcast(everywhere(builder, bits), _VECTOR)

        return vector(data, types.int64), generate

    return load


def quants_of(bits: int) -> Any:
    """Return the function that loads 16 quants of `bits` bits from a byte offset on, one per word."""

    @intrinsic
    def load(typing: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            n_bytes = 2 * bits
            address = element_address(context, builder, signature.args[0], *args)
            packed = builder.load(builder.bitcast(address, ir.VectorType(_I8, n_bytes).as_pointer()))
            packed.align = 1
            if bits == 8:
                return builder.zext(packed, _INTS)
            # The two bytes that contain a quant; of the last byte there is no next one, and none is needed.
            firsts, shifts = zip(*(divmod(i * bits, 8) for i in range(LANES)), strict=True)
            places = [min(byte + next_, n_bytes - 1) for byte in firsts for next_ in (0, 1)]
            mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), places)
            pairs = builder.bitcast(builder.shuffle_vector(packed, packed, mask), ir.VectorType(_I16, LANES))
            words = builder.lshr(builder.zext(pairs, _INTS), ir.Constant(_INTS, list(shifts)))
            return builder.and_(words, ir.Constant(_INTS, [(1 << bits) - 1] * LANES))

        return lanes(data, types.int64), generate

    return load


@intrinsic
def floats_of_words(typing: Any, words: Any) -> Any:
    """Return 16 words as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _VECTOR)

    return vector(lanes), generate
