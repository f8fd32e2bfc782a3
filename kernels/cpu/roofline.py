"""What the machine itself can do: how fast it reads memory, and how fast it multiplies and adds in registers.

Both are limits that no kernel passes; how near a measured one comes is its share. The NumPy twins, for machines without
compiled kernels, are in `roofline_numpy.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.jit import jit

# The widest register, so that each sum is one of them.
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
# Sums that do not wait for each other: at least two units times four cycles, and few enough for sixteen registers.
CHAINS = 12


@jit
def read_in_order(words: Any) -> int:
    """The exclusive or of int64s: each is loaded once, and next to nothing is done with it.

    Over an index, because LLVM makes no vectors of a loop over the array itself.
    """
    mixed = 0
    for i in range(words.size):
        mixed ^= words[i]
    return mixed


@jit
def read(words: Any) -> Any:
    """The same in eight places in turns: a processor looks ahead in each, and so reads faster. `benchmarks/ways.py`."""
    n = words.size // 8
    a, b, c, d = words[:n], words[n : 2 * n], words[2 * n : 3 * n], words[3 * n : 4 * n]
    e, f, g, h = words[4 * n : 5 * n], words[5 * n : 6 * n], words[6 * n : 7 * n], words[7 * n : 8 * n]
    mixed = 0
    for i in range(n):
        mixed ^= a[i] ^ b[i] ^ c[i] ^ d[i] ^ e[i] ^ f[i] ^ g[i] ^ h[i]
    return mixed ^ read_in_order(words[8 * n :])


@intrinsic
def _burst(typing: Any, rounds: Any) -> Any:
    """`rounds` times one fused multiplication and addition in each chain, x = x / 2 + 1; a lane of their sum."""

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
    """Nothing but arithmetic in registers, `flops(rounds)` of it."""
    return _burst(rounds)  # type: ignore[no-any-return]


def flops(rounds: int) -> int:
    """Additions and multiplications of `compute(rounds)`."""
    return 2 * rounds * CHAINS * LANES
