"""Activation functions of feed-forward networks. The NumPy references are in `reference.py`."""

from __future__ import annotations

from typing import Any

from ..build.exponentials import exp, tanh
from ..build.jit import entry, jit
from ..build.layout import CLAMPED_SWIGLU, LANES, SILU
from ..build.memory import floats
from ..build.vectors import add, div, fma, get, larger, largest_lane, load, mul, put, smaller, splat, store, sub, zeros


@jit
def silu(x: Any) -> Any:
    """`x / (1 + exp(-x))`; where the exponential overflows, x / infinity is the right answer: 0."""
    return div(x, add(splat(1.0), exp(sub(zeros(), x))))


@jit
def gelu(x: Any) -> Any:
    """`0.5 x (1 + tanh(u))` with `u = sqrt(2/pi) (x + 0.044715 x**3)`, written as `x / (1 + exp(-2 u))`."""
    u = mul(x, fma(mul(x, x), splat(0.044715), splat(1.0)))
    return div(x, add(splat(1.0), exp(mul(u, splat(-2 * 0.7978845608028654)))))


@jit
def clamped_swiglu(gate: Any, up: Any) -> Any:
    """`(u + 1) * g / (1 + exp(-1.702 g))`, where g is the gate, at most 7, and u is up, from -7 to 7."""
    g, u = smaller(splat(7.0), gate), smaller(splat(7.0), larger(splat(-7.0), up))
    return div(mul(add(u, splat(1.0)), g), add(splat(1.0), exp(mul(g, splat(-1.702)))))


@jit
def activate(activation: int, x: Any) -> Any:
    """Apply the activation with this number (`layout.py`)."""
    if activation == SILU:
        return silu(x)
    return gelu(x)


@jit
def gated(activation: int, gate: Any, up: Any) -> Any:
    """`activation(gate) * up`, or `clamped_swiglu`."""
    if activation == CLAMPED_SWIGLU:
        return clamped_swiglu(gate, up)
    return mul(activate(activation, gate), up)


# ---- soft caps of logits ----


@entry
def soft_cap(x: int, n: int, cap: float, out: int) -> None:
    """`out[i] = cap * tanh(x[i] / cap)` of n float32 at address `x`; one order of roundings for every element."""
    values, capped, whole = floats(x), floats(out), n // LANES * LANES
    factor, of = splat(1 / cap), splat(cap)
    for i in range(0, whole, LANES):
        store(capped, i, mul(tanh(mul(load(values, i), factor)), of))
    for i in range(whole, n):
        put(capped, i, largest_lane(mul(tanh(mul(splat(get(values, i)), factor)), of)))
