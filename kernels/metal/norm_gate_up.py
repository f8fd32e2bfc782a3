"""RMSNorm, gate, up and activation in one launch: the first half of a gated feed-forward network.

Faster than four launches: they would wait for each other, and the two products would go to memory and come back. The
activation stays out of the second half, where every row would have to take it again.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np

from kernels.kernel import Kernel
from kernels.launch import launch
from kernels.metal import arguments
from kernels.metal.layout import Q8_0Matrix, in_device_memory
from kernels.metal.rows import MOST_VECTORS, Tuning, default_tuning, geometry
from kernels.metal.twins import EPSILON, Expected, normed_products

KERNEL = Kernel.load("norm_gate_up", ["x", "gain", "eps", "factors", "gate_wq", "gate_ws", "up_wq", "up_ws"], ["y"])


def norm_gate_up(
    x: mx.array,
    gain: mx.array,
    eps: float,
    gate: Q8_0Matrix,
    up: Q8_0Matrix,
    activation: Literal["silu", "gelu"] = "silu",
    factors: mx.array | None = None,
    *,
    tuning: Tuning | None = None,
) -> mx.array:
    """`activation(h @ gate.T) * (h @ up.T)` with `h = rms_norm(x, gain, eps)`.

    Args:
        x: (V, K) float16 or float32, V from 1 to 8; or any number of rows that `norm_rows` has made.
        gain: (K,) float16 or float32.
        eps: what is added to the mean square.
        gate: (N, K).
        up: (N, K).
        activation: SiLU, or the tanh form of GELU.
        factors: (V,) float32, those that `norm_rows` gave with x; without them this kernel takes the norm.
        tuning: rows and SIMD-groups; no bit of the result depends on it, nor on how many vectors there are.

    Returns:
        (V, N) float32. The bound is in `twin`.

    Raises:
        ValueError: x, the gain, the factors or a matrix do not fit, or the activation is unknown.
    """
    if activation not in ("silu", "gelu"):
        raise ValueError(f"norm_gate_up: expected the activation 'silu' or 'gelu', found {activation!r}")
    N, K = gate.shape
    V = arguments.normed_vectors("norm_gate_up", x, gain, K, factors)
    arguments.same("norm_gate_up", "rows of up", up.shape[0], N)
    arguments.same("norm_gate_up", "columns of up", up.shape[1], K)
    # Two matrices take the registers that many vectors would have.
    g = geometry((N,), V, tuning or default_tuning(2 * N, min(V, MOST_VECTORS)))
    normed = x, gain, arguments.constants(eps), arguments.factors(factors)
    (y,) = launch(
        KERNEL,
        [*normed, *(part for m in (gate, up) for part in (m.wq, in_device_memory(m.ws)))],
        template=(("N", N), ("K", K), ("GELU", activation == "gelu"), ("READY", factors is not None), *g.template),
        grid=g.grid,
        threadgroup=g.threadgroup,
        output_shapes=[(V, N)],
        output_dtypes=[mx.float32],
    )
    return y


def twin(
    x: mx.array,
    gain: mx.array,
    eps: float,
    gate: Q8_0Matrix,
    up: Q8_0Matrix,
    activation: str = "silu",
    factors: mx.array | None = None,
) -> Expected:
    """The same in float64.

    Both activations are `a / (1 + exp(-z))`. Their slope is at most 1.13, so an error of the gate grows by that; exp
    is good to 4 units in the last place, which with the sum, the division and the product with up makes 12 roundings.
    GELU's z is computed: 4 roundings of z are `4 |z|` of exp(-z), and `|z| / (1 + exp(|z|))` never exceeds 0.28.
    """
    a, a_bound = normed_products(x, gain, eps, gate, factors)
    b, b_bound = normed_products(x, gain, eps, up, factors)
    z = a if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)
    with np.errstate(over="ignore"):
        activated = a / (1 + np.exp(-z))
    value = activated * b
    own = 12 * np.abs(value) + (0 if activation == "silu" else 4 * 0.28 * np.abs(a * b))
    carried = 1.13 * a_bound * (np.abs(b) + b_bound) + np.abs(activated) * b_bound
    return Expected(value, carried + EPSILON * own)
