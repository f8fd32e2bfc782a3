"""RMSNorm, gate projection, up projection and activation in one launch: the first half of a gated feed-forward network.

This is faster than four launches, which wait for each other and pass the two products through memory.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import launch
from . import arguments
from .layout import StoredMatrix
from .reference import EPSILON, Expected, normed_products
from .rows import MOST_VECTORS, Tuning, default_tuning, geometry

KERNEL = Kernel.load(
    "norm_gate_up", ["x", "norm_weight", "eps", "factors", "gate_wq", "gate_ws", "up_wq", "up_ws"], ["y"]
)


def norm_gate_up(
    x: mx.array,
    norm_weight: mx.array,
    eps: float,
    gate: StoredMatrix,
    up: StoredMatrix,
    activation: Literal["silu", "gelu"] = "silu",
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> mx.array:
    """Compute `activation(h @ gate.T) * (h @ up.T)`, (V, N) float32, with `h = rms_norm(x, norm_weight, eps)`.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; with `factors`, the rows that `norm_rows` returned, V at least 1.
        norm_weight: (K,) float16 or float32.
        eps: epsilon of the norm.
        gate: (N, K).
        up: (N, K); its stored type may differ from that of `gate`.
        activation: SiLU, or the tanh form of GELU.
        factors: (V,) float32, returned by `norm_rows` together with x; if None, this kernel computes the norm.
        tuning: how the work is divided among threads (`Tuning`), which changes no bits of the result; None for the
            default.

    Raises:
        ValueError: an array or a matrix has a wrong shape or type, or the activation is unknown.
    """
    if activation not in ("silu", "gelu"):
        raise ValueError(f"norm_gate_up: expected the activation 'silu' or 'gelu', found {activation!r}")
    N, K = gate.shape
    V = arguments.normed_vectors("norm_gate_up", x, norm_weight, K, factors)
    arguments.same("norm_gate_up", "rows of up", up.shape[0], N)
    arguments.same("norm_gate_up", "columns of up", up.shape[1], K)
    # The default tuning is that of a matrix of 2 N rows, because there are two matrices. For more than 8 vectors, it is
    # the tuning for 8 vectors, with two rows per lane: with four, as for one matrix, the sums of both matrices would
    # take too many registers.
    g = geometry((N,), V, tuning or default_tuning(2 * N, min(V, MOST_VECTORS)))
    normed = x, norm_weight, arguments.constants(eps), arguments.factors(factors)
    (y,) = launch(
        KERNEL,
        [*normed, *gate.inputs, *up.inputs],
        template=(
            ("GATE_W", gate.layout.code),
            ("UP_W", up.layout.code),
            ("N", N),
            ("K", K),
            ("GELU", activation == "gelu"),
            ("READY", factors is not None),
            *g.template,
        ),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(
    x: mx.array,
    norm_weight: mx.array,
    eps: float,
    gate: StoredMatrix,
    up: StoredMatrix,
    activation: str = "silu",
    factors: mx.array | None = None,
) -> Expected:
    """Return the expected result in float64, with the error bound.

    Let `a` be the product with gate, and `b` the product with up. Both activations are `a / (1 + exp(-z))`: for SiLU,
    `z` is `a`; for GELU, `z` is a polynomial of `a`. Their slope is at most 1.13, so an error of `a` grows at most by
    this factor. The result has these roundings, of `EPSILON` each:

    - 8 of exp, whose error is at most 4 units in the last place
    - 1 of the sum `1 + exp(-z)`
    - 1 of the division
    - 1 of the multiplication by `b`

    These are 11 roundings; the bound allows 12. For GELU, `z` has 4 roundings. They change `exp(-z)` by `4 |z|`
    roundings, and the result by at most `4 * 0.28` roundings of `a * b`, because `|z| / (1 + exp(|z|))` is at most
    0.28.
    """
    a, a_bound = normed_products(x, norm_weight, eps, gate, factors)
    b, b_bound = normed_products(x, norm_weight, eps, up, factors)
    z = a if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)
    with np.errstate(over="ignore"):
        activated = a / (1 + np.exp(-z))
    value = activated * b
    own = 12 * np.abs(value) + (0 if activation == "silu" else 4 * 0.28 * np.abs(a * b))
    carried = 1.13 * a_bound * (np.abs(b) + b_bound) + np.abs(activated) * b_bound
    return Expected(value, carried + EPSILON * own)
