"""RMSNorm and the projections to queries, keys and values in one launch.

This is faster than a launch for the norm and three for the projections: launches wait for each other, and the matrices
of keys and values have too few rows to use a GPU's whole memory bandwidth.
"""

from __future__ import annotations

import mlx.core as mx

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix
from .reference import Expected, normed_products
from .rows import Tuning, default_tuning, geometry

KERNEL = Kernel.load(
    "norm_qkv",
    ["x", "norm_weight", "eps", "factors", "q_wq", "q_ws", "k_wq", "k_ws", "v_wq", "v_ws"],
    ["q", "k", "v"],
)


def norm_qkv(
    x: mx.array,
    norm_weight: mx.array,
    eps: float,
    q: StoredMatrix,
    k: StoredMatrix,
    v: StoredMatrix,
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute `h @ q.T`, `h @ k.T` and `h @ v.T` with `h = rms_norm(x, norm_weight, eps)`.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; with `factors`, the rows that `norm_rows` returned, V at least 1.
        norm_weight: (K,) float16 or float32.
        eps: epsilon of the norm.
        q: (NQ, K). The stored types of the three matrices may differ.
        k: (NK, K).
        v: (NV, K).
        factors: (V,) float32, returned by `norm_rows` together with x; if None, this kernel computes the norm.
        tuning: changes the speed, but no bits; see `Tuning`.

    Returns:
        (V, NQ), (V, NK) and (V, NV) float32, bit-identical to three calls of `norm_project`.

    Raises:
        ValueError: an array or a matrix has a wrong shape or type.
    """
    K = q.shape[1]
    V = arguments.normed_vectors("norm_qkv", x, norm_weight, K, factors)
    arguments.same("norm_qkv", "columns of k", k.shape[1], K)
    arguments.same("norm_qkv", "columns of v", v.shape[1], K)
    n_rows = (q.shape[0], k.shape[0], v.shape[0])
    g = geometry(n_rows, V, tuning or default_tuning(sum(n_rows), V))
    normed = x, norm_weight, arguments.constants(eps), arguments.factors(factors)
    outputs = launch(
        KERNEL,
        [*normed, *q.inputs, *k.inputs, *v.inputs],
        template=(
            ("Q_W", q.layout.code),
            ("K_W", k.layout.code),
            ("V_W", v.layout.code),
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


def reference(
    x: mx.array,
    norm_weight: mx.array,
    eps: float,
    q: StoredMatrix,
    k: StoredMatrix,
    v: StoredMatrix,
    factors: mx.array | None = None,
) -> list[Expected]:
    """Return the expected results in float64, with the error bounds."""
    return [normed_products(x, norm_weight, eps, matrix, factors) for matrix in (q, k, v)]
