"""Quants of 4 bits that are indices of 16 levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ..build.layout import LANES
from ..build.vectors import call_llvm, element_address, register_lanes, vector

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(_I8, LANES)


def _look_up(builder: Any, levels: Sequence[int], quants: Any) -> Any:
    """Return the levels of 16 bytes below 16 as bytes."""
    table = ir.Constant(_BYTES, [level & 255 for level in levels])
    is_x86 = binding.get_process_triple().startswith("x86_64")
    name = "llvm.x86.ssse3.pshuf.b.128" if is_x86 else "llvm.aarch64.neon.tbl1.v16i8"
    return call_llvm(builder, name, _BYTES, [table, quants])


def load_levels(levels: Sequence[int]) -> Any:
    """Make the function that loads 32 quants of 4 bits and returns `scale * levels[quant]`, in two vectors.

    The quants are in the halves of 16 bytes, those of the first 16 in the low halves. Levels are signed bytes. With
    AVX-512 a quant is an index into a register of all 16 products; otherwise one instruction looks up 16 bytes.
    """

    @intrinsic
    def load(typing: Any, data: Any, at: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data, at, scale = args
            address = builder.bitcast(
                element_address(context, builder, signature.args[0], data, at), _BYTES.as_pointer()
            )
            loaded = builder.load(address)
            loaded.align = 1
            if register_lanes() == LANES:
                words = builder.zext(loaded, _INTS)
                table = builder.fmul(scale, ir.Constant(_VECTOR, [float(level) for level in levels]))
                halves = [words, builder.lshr(words, ir.Constant(_INTS, [4] * LANES))]
                name = "llvm.x86.avx512.permvar.sf.512"
                found = [call_llvm(builder, name, _VECTOR, [table, half]) for half in halves]
            else:
                low = builder.and_(loaded, ir.Constant(_BYTES, [15] * LANES))
                high = builder.lshr(loaded, ir.Constant(_BYTES, [4] * LANES))
                looked = [builder.sext(_look_up(builder, levels, half), _INTS) for half in (low, high)]
                found = [builder.fmul(scale, builder.sitofp(one, _VECTOR)) for one in looked]
            return context.make_tuple(builder, signature.return_type, found)

        return types.UniTuple(vector, 2)(data, types.int64, vector), generate

    return load
