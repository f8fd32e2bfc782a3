"""Soft caps of logits, `cap * tanh(x / cap)`. The twin is NumPy's tanh."""

from __future__ import annotations

from ..build.exponentials import tanh
from ..build.jit import entry
from ..build.layout import LANES
from ..build.memory import floats
from ..build.vectors import get, largest_lane, load, mul, put, splat, store


@entry
def soft_cap(x: int, n: int, cap: float, out: int) -> None:
    """`out[i] = cap * tanh(x[i] / cap)` of n float32 at address `x`; one order of roundings for every element."""
    values, capped, whole = floats(x), floats(out), n // LANES * LANES
    factor, of = splat(1 / cap), splat(cap)
    for i in range(0, whole, LANES):
        store(capped, i, mul(tanh(mul(load(values, i), factor)), of))
    for i in range(whole, n):
        put(capped, i, largest_lane(mul(tanh(mul(splat(get(values, i)), factor)), of)))
