"""RMSNorm and one matrix in one launch, for example the final norm and the output matrix, which give the logits.

This is faster than a norm and then a product, because in a small model, a second launch that waits for the first one
costs more than the norm. If the argument `factors` is None, every SIMD-group computes the norm: it reads all of x for
the product anyway, and also sums the squares.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix
from .reference import Expected, normed_products
from .rows import Tuning, default_tuning, geometry

KERNEL = Kernel.load("norm_project", ["x", "norm_weight", "eps", "factors", "wq", "ws"], ["y"])


def norm_project(
    x: mx.array,
    norm_weight: mx.array,
    eps: float,
    weight: StoredMatrix,
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> mx.array:
    """Compute `rms_norm(x, norm_weight, eps) @ weight.T`, (V, N) float32.

    The error is at most `11 * 2**-24 * sum(|h| * |weight|)` with h the normed x. The 11 roundings are 4 of the product,
    1 of `x * norm_weight`, 5 of the norm's factor and 1 of the multiplication by the factor.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; with `factors`, the rows that `norm_rows` returned, V at least 1.
        norm_weight: (K,) float16 or float32.
        eps: epsilon of the norm.
        weight: (N, K), of any stored type.
        factors: (V,) float32, returned by `norm_rows` together with x; if None, this kernel computes the norm.
        tuning: changes the speed, but no bits; see `Tuning`.

    Raises:
        ValueError: x, the norm weight or the factors have a wrong shape or type.
    """
    N, K = weight.shape
    V = arguments.normed_vectors("norm_project", x, norm_weight, K, factors)
    g = geometry((N,), V, tuning or default_tuning(N, V))
    (y,) = launch(
        KERNEL,
        [x, norm_weight, arguments.constants(eps), arguments.factors(factors), *weight.inputs],
        template=(("W", weight.layout.code), ("N", N), ("K", K), ("READY", factors is not None), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(
    x: mx.array, norm_weight: mx.array, eps: float, weight: StoredMatrix, factors: mx.array | None = None
) -> Expected:
    """Return the expected result in float64, with the error bound."""
    return normed_products(x, norm_weight, eps, weight, factors)
