"""Activation functions of feed-forward networks, and soft caps of logits.

`tests/cpu_reference.py` has references of SiLU, GELU and the squared ReLU.
"""

from __future__ import annotations

from typing import Any

from ..build.exponentials import exp, tanh
from ..build.jit import entry, jit
from ..build.layout import CLAMPED_SWIGLU, GELU, LANES, RELU2, SILU
from ..build.memory import floats
from ..build.vectors import add, div, fma, get, larger, largest_lane, load, mul, put, smaller, splat, store, sub, zeros


@jit
def silu(x: Any) -> Any:
    """Return `x / (1 + exp(-x))`. If the exponential overflows, the result x / infinity is 0, which is correct."""
    return div(x, add(splat(1.0), exp(sub(zeros(), x))))


@jit
def gelu(x: Any) -> Any:
    """Return `0.5 * x * (1 + tanh(v)) = x / (1 + exp(-2 * v))` with `v = sqrt(2 / pi) * (x + 0.044715 * x**3)`."""
    u = mul(x, fma(mul(x, x), splat(0.044715), splat(1.0)))
    return div(x, add(splat(1.0), exp(mul(u, splat(-2 * 0.7978845608028654)))))


@jit
def gelu_erf(x: Any) -> Any:
    """Return `0.5 * x * erfc(-x / sqrt(2))`.

    For z >= 0, erfc(z) is `t * exp(p(t) - z**2)` with `t = 1 / (1 + z / 2)` and a polynomial p; the relative error is
    at most 1.2e-7. Source of p: W. H. Press et al., "Numerical Recipes in C", section 6.2.
    """
    z = mul(larger(x, sub(zeros(), x)), splat(0.7071067811865476))
    t = div(splat(1.0), fma(z, splat(0.5), splat(1.0)))
    p = fma(t, splat(0.17087277), splat(-0.82215223))
    p = fma(t, fma(t, p, splat(1.48851587)), splat(-1.13520398))
    p = fma(t, fma(t, p, splat(0.27886807)), splat(-0.18628806))
    p = fma(t, fma(t, p, splat(0.09678418)), splat(0.37409196))
    p = fma(t, fma(t, p, splat(1.00002368)), splat(-1.26551223))
    half = mul(mul(splat(0.5), t), exp(sub(p, mul(z, z))))
    # For x >= 0 the result is x + gelu_erf(-x).
    return sub(larger(x, zeros()), mul(larger(x, sub(zeros(), x)), half))


@jit
def relu2(x: Any) -> Any:
    """Return `max(x, 0)**2`."""
    positive = larger(x, zeros())
    return mul(positive, positive)


@jit
def clamped_swiglu(gate: Any, up: Any) -> Any:
    """Return `(u + 1) * g / (1 + exp(-1.702 * g))`, with g = min(gate, 7), and u = up clamped to [-7, 7]."""
    g, u = smaller(splat(7.0), gate), smaller(splat(7.0), larger(splat(-7.0), up))
    return div(mul(add(u, splat(1.0)), g), add(splat(1.0), exp(mul(g, splat(-1.702)))))


@jit
def activate(activation: int, x: Any) -> Any:
    """Apply an activation function of one argument: SILU, GELU, GELU_ERF or RELU2 of `layout.py`."""
    if activation == SILU:
        return silu(x)
    if activation == GELU:
        return gelu(x)
    if activation == RELU2:
        return relu2(x)
    return gelu_erf(x)


@jit
def gated(activation: int, gate: Any, up: Any) -> Any:
    """Return `activation(gate) * up`, or `clamped_swiglu(gate, up)`."""
    if activation == CLAMPED_SWIGLU:
        return clamped_swiglu(gate, up)
    return mul(activate(activation, gate), up)


# ---- soft caps of logits ----


@entry
def soft_cap(x: int, n: int, cap: float, out: int) -> None:
    """Write `cap * tanh(x[i] / cap)` to `out[i]` for n float32 at address `x`. The bits do not depend on i and n."""
    values, capped, whole = floats(x), floats(out), n // LANES * LANES
    factor, of = splat(1 / cap), splat(cap)
    for i in range(0, whole, LANES):
        store(capped, i, mul(tanh(mul(load(values, i), factor)), of))
    for i in range(whole, n):
        put(capped, i, largest_lane(mul(tanh(mul(splat(get(values, i)), factor)), of)))
