"""Kernels that measure the machine's limits: memory bandwidth, and multiply-adds in registers.

Reports give the speed of other kernels relative to these limits. `mlx_engine/bench/roofline.py` has the NumPy
references, for machines without compiled kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .build.jit import entry, jit
from .build.memory import floats, words
from .build.vectors import call_llvm, put, register_lanes

# Number of floats of an accumulator: the lanes of one SIMD register, but at least 8.
LANES = max(8, register_lanes())
# Number of independent accumulators. Two FMA units with a latency of four cycles need at least 8. The 16 registers of
# AVX2 must hold all accumulators and two constants.
CHAINS = 12


@jit
def read_in_order(array: Any) -> int:
    """Read an array of int64s in order; return the exclusive or of all, so that no read is optimised away."""
    mixed = 0
    # This is a loop over indices, because LLVM does not vectorise `for value in array`.
    for i in range(array.size):
        mixed ^= array[i]
    return mixed


@jit
def read(array: Any) -> Any:
    """Read an array of int64s like `read_in_order`, but in eight streams: this is faster (`benchmarks/ways.py`)."""
    n = array.size // 8
    a, b, c, d = array[:n], array[n : 2 * n], array[2 * n : 3 * n], array[3 * n : 4 * n]
    e, f, g, h = array[4 * n : 5 * n], array[5 * n : 6 * n], array[6 * n : 7 * n], array[7 * n : 8 * n]
    mixed = 0
    for i in range(n):
        mixed ^= a[i] ^ b[i] ^ c[i] ^ d[i] ^ e[i] ^ f[i] ^ g[i] ^ h[i]
    return mixed ^ read_in_order(array[8 * n :])


@intrinsic
def _burst(typing: Any, rounds: Any) -> Any:
    """Run `rounds` fused multiply-adds x = x / 2 + 1 in each of CHAINS accumulators; return a lane of their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        half, one = (ir.Constant(vector, [value] * LANES) for value in (0.5, 1.0))
        starts = (ir.Constant(vector, [float(chain)] * LANES) for chain in range(CHAINS))
        chains = [cgutils.alloca_once_value(builder, start) for start in starts]
        with cgutils.for_range(builder, args[0]):
            for chain in chains:
                values = [builder.load(chain), half, one]
                builder.store(call_llvm(builder, f"llvm.fma.v{LANES}f32", vector, values), chain)
        total = builder.load(chains[0])
        for chain in chains[1:]:
            total = builder.fadd(total, builder.load(chain))
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64), generate


@jit
def compute(rounds: int) -> float:
    """Run `rounds` multiply-adds in each of CHAINS accumulators, without memory access; return a lane of their sum."""
    return _burst(rounds)  # type: ignore[no-any-return]


@entry
def read_words(address: int, n: int, out: int) -> None:
    """Write `read` of the n int64s at `address` to the int64 at address `out`."""
    words(out)[0] = read(words(address)[:n])


@entry
def read_words_in_order(address: int, n: int, out: int) -> None:
    """Write `read_in_order` of the n int64s at `address` to the int64 at address `out`."""
    words(out)[0] = read_in_order(words(address)[:n])


@entry
def run_rounds(rounds: int, out: int) -> None:
    """Run `compute(rounds)`; write the number of its operations (int64) to `out`, its result (float32) to `out + 8`."""
    words(out)[0] = 2 * rounds * CHAINS * LANES
    put(floats(out), 2, compute(rounds))
