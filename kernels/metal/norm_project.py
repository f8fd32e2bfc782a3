"""RMSNorm and one matrix in one launch: the end of a model, logits.

Faster than a norm and then a product: on a small model a launch that waits for another costs more than the norm. Every
SIMD-group takes the squares of all of x, which it reads anyway.
"""

from __future__ import annotations

import mlx.core as mx

from kernels.kernel import Kernel
from kernels.launch import launch
from kernels.metal import arguments
from kernels.metal.layout import Q8_0Matrix, in_device_memory
from kernels.metal.rows import Tuning, default_tuning, geometry
from kernels.metal.twins import Expected, normed_products

KERNEL = Kernel.load("norm_project", ["x", "gain", "eps", "factors", "wq", "ws"], ["y"])


def norm_project(
    x: mx.array,
    gain: mx.array,
    eps: float,
    weight: Q8_0Matrix,
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> mx.array:
    """`rms_norm(x, gain, eps) @ weight.T`.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; or any number of rows that `norm_rows` has made.
        gain: (K,) float16 or float32.
        eps: what is added to the mean square.
        weight: (N, K).
        factors: (V,) float32, those that `norm_rows` gave with x; without them this kernel takes the norm.
        tuning: rows and SIMD-groups; no bit of the result depends on it, nor on how many vectors there are.

    Returns:
        (V, N) float32. With h the normed x, within 11 roundings of `sum(|h| * |weight|)`: 4 of the product, 1 of
        `x * gain`, 5 of the norm's factor and 1 to multiply by it.

    Raises:
        ValueError: x, the gain or the factors do not fit.
    """
    N, K = weight.shape
    V = arguments.normed_vectors("norm_project", x, gain, K, factors)
    g = geometry((N,), V, tuning or default_tuning(N, V))
    (y,) = launch(
        KERNEL,
        [x, gain, arguments.constants(eps), arguments.factors(factors), weight.wq, in_device_memory(weight.ws)],
        template=(("N", N), ("K", K), ("READY", factors is not None), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def twin(x: mx.array, gain: mx.array, eps: float, weight: Q8_0Matrix, factors: mx.array | None = None) -> Expected:
    """The same in float64."""
    return normed_products(x, gain, eps, weight, factors)
