"""Activation functions of feed-forward networks. The NumPy twins are in `activations_numpy.py`."""

from __future__ import annotations

from typing import Any

from kernels.cpu.exponentials import exp
from kernels.cpu.jit import jit
from kernels.cpu.layout import SILU
from kernels.cpu.vectors import add, div, fma, mul, splat, sub, zeros


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
def activate(activation: int, x: Any) -> Any:
    """Apply the activation with this number (`layout.py`)."""
    if activation == SILU:
        return silu(x)
    return gelu(x)


@jit
def gated(activation: int, gate: Any, up: Any) -> Any:
    """`activation(gate) * up`."""
    return mul(activate(activation, gate), up)
