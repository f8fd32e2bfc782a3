"""Rung 3 of the Q8_0 ladder: several rows per SIMD-group, 16 weights per load, eight vectors at a time.

The ladder is four kernels, its rungs, for the same product, from slow to fast. With float32 activations, the engine
uses this kernel in decode (gemv) and in prefill. No GPU has been measured. The kernel should be faster than rung 2,
`simd_per_row`: a lane loads 16 bytes of Q8_0 at once, so four times as many bytes are in flight, and each load of x is
used for several rows. Weights are nearly all of the memory traffic; for up to eight vectors they are read only once.
The order of summation depends only on K.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix, word
from .reference import Expected, products, wide
from .rows import Tuning, default_tuning, geometry, k_split

KERNEL = Kernel.load("matvec", ["x", "wq", "ws"], ["y"])


def matvec(
    x: mx.array, weight: StoredMatrix, *, dtype: mx.Dtype = mx.float32, tuning: Tuning | None = None
) -> mx.array:
    """Compute `x @ weight.T`, (V, N), for x (V, K) of float16, bfloat16 or float32 and any number V of vectors.

    The result is rounded from float32 to `dtype`, which is float32 or the type of x. Before this rounding, the error is
    at most `4 * 2**-24 * sum(|x| * |weight|)`. The bits of a row depend neither on V nor on `tuning`.

    Raises:
        ValueError: x has a wrong shape or type, or `dtype` is not allowed.
    """
    N, K = weight.shape
    V = arguments.vectors("matvec", x, K, mx.bfloat16)
    if dtype not in (x.dtype, mx.float32):
        raise ValueError(f"matvec: expected a result of float32 or of {word(x.dtype)}, found {dtype}")
    g = geometry((N,), V, tuning or default_tuning(N, V), k_split(N, K, V))
    (y,) = launch(
        KERNEL,
        [x, *weight.inputs],
        template=(("W", weight.layout.code), ("N", N), ("K", K), ("Y", dtype), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[dtype],
    )
    return y


def reference(x: mx.array, weight: StoredMatrix) -> Expected:
    """Return the expected result in float64, with the error bound."""
    return products(wide(x.astype(mx.float32)), weight)
