"""Kernels that measure the machine's limits: memory bandwidth, and multiply-adds in registers.

No kernel exceeds these limits; a kernel's share of them is reported. `roofline_numpy.py` has the NumPy references, for
machines without compiled kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .build.jit import jit

# Floats of the widest register, so that each sum is one register.
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
# Independent sums: at least two FMA units times four cycles of latency, and few enough for sixteen registers.
CHAINS = 12


@jit
def read_in_order(words: Any) -> int:
    """Return the exclusive or of int64s: each is loaded once, with almost no arithmetic.

    The loop is over an index, because LLVM does not vectorise a loop over the array itself.
    """
    mixed = 0
    for i in range(words.size):
        mixed ^= words[i]
    return mixed


@jit
def read(words: Any) -> Any:
    """Return the same from eight interleaved streams, which a processor prefetches and reads faster than one stream.

    `benchmarks/ways.py` measures streams.
    """
    n = words.size // 8
    a, b, c, d = words[:n], words[n : 2 * n], words[2 * n : 3 * n], words[3 * n : 4 * n]
    e, f, g, h = words[4 * n : 5 * n], words[5 * n : 6 * n], words[6 * n : 7 * n], words[7 * n : 8 * n]
    mixed = 0
    for i in range(n):
        mixed ^= a[i] ^ b[i] ^ c[i] ^ d[i] ^ e[i] ^ f[i] ^ g[i] ^ h[i]
    return mixed ^ read_in_order(words[8 * n :])


@intrinsic
def _burst(typing: Any, rounds: Any) -> Any:
    """Run `rounds` fused multiply-adds x = x / 2 + 1 in each chain; return a lane of the sum of chains."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        half, one = (ir.Constant(vector, [value] * LANES) for value in (0.5, 1.0))
        kind = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        starts = (ir.Constant(vector, [float(chain)] * LANES) for chain in range(CHAINS))
        chains = [cgutils.alloca_once_value(builder, start) for start in starts]
        with cgutils.for_range(builder, args[0]):
            for chain in chains:
                builder.store(builder.call(fma, [builder.load(chain), half, one]), chain)
        total = builder.load(chains[0])
        for chain in chains[1:]:
            total = builder.fadd(total, builder.load(chain))
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64), generate


@jit
def compute(rounds: int) -> float:
    """Run `flops(rounds)` operations in registers, without memory access."""
    return _burst(rounds)  # type: ignore[no-any-return]


def flops(rounds: int) -> int:
    """Return the number of additions and multiplications of `compute(rounds)`."""
    return 2 * rounds * CHAINS * LANES
