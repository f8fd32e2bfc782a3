"""RMSNorm and three matrices in one launch: queries, keys and values.

Faster than three launches with the normed x because they would wait for each other, and because the few rows of keys
and values alone do not keep a GPU's memory busy.
"""

from __future__ import annotations

import mlx.core as mx

from kernels.kernel import Kernel
from kernels.launch import launch
from kernels.metal import arguments
from kernels.metal.layout import Q8_0Matrix, in_device_memory
from kernels.metal.rows import Tuning, default_tuning, geometry
from kernels.metal.twins import Expected, normed_products

KERNEL = Kernel.load(
    "norm_qkv",
    ["x", "gain", "eps", "factors", "q_wq", "q_ws", "k_wq", "k_ws", "v_wq", "v_ws"],
    ["q", "k", "v"],
)


def norm_qkv(
    x: mx.array,
    gain: mx.array,
    eps: float,
    q: Q8_0Matrix,
    k: Q8_0Matrix,
    v: Q8_0Matrix,
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`rms_norm(x, gain, eps)` times three matrices.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; or any number of rows that `norm_rows` has made.
        gain: (K,) float16 or float32.
        eps: what is added to the mean square.
        q: (NQ, K).
        k: (NK, K).
        v: (NV, K).
        factors: (V,) float32, those that `norm_rows` gave with x; without them this kernel takes the norm.
        tuning: rows and SIMD-groups; no bit of the result depends on it, nor on how many vectors there are.

    Returns:
        (V, NQ), (V, NK) and (V, NV) float32, in the bits of three `norm_project`, with its bound.

    Raises:
        ValueError: x, the gain, the factors or a matrix do not fit.
    """
    K = q.shape[1]
    V = arguments.normed_vectors("norm_qkv", x, gain, K, factors)
    arguments.same("norm_qkv", "columns of k", k.shape[1], K)
    arguments.same("norm_qkv", "columns of v", v.shape[1], K)
    n_rows = (q.shape[0], k.shape[0], v.shape[0])
    g = geometry(n_rows, V, tuning or default_tuning(sum(n_rows), V))
    normed = x, gain, arguments.constants(eps), arguments.factors(factors)
    outputs = launch(
        KERNEL,
        [*normed, *(part for m in (q, k, v) for part in (m.wq, in_device_memory(m.ws)))],
        template=(
            ("NQ", n_rows[0]),
            ("NK", n_rows[1]),
            ("NV", n_rows[2]),
            ("K", K),
            ("READY", factors is not None),
            *g.template,
        ),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, n) for n in n_rows],
        output_dtypes=[mx.float32] * 3,
    )
    return outputs[0], outputs[1], outputs[2]


def twin(
    x: mx.array,
    gain: mx.array,
    eps: float,
    q: Q8_0Matrix,
    k: Q8_0Matrix,
    v: Q8_0Matrix,
    factors: mx.array | None = None,
) -> list[Expected]:
    """The same in float64."""
    return [normed_products(x, gain, eps, matrix, factors) for matrix in (q, k, v)]
