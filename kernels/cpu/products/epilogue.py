"""The epilogue of products: bias, activation, residual."""

from __future__ import annotations

from typing import Any

from ..build.jit import jit
from ..build.layout import ACTIVATION, BIAS, COLUMN, LANES, WIDTH, N
from ..build.memory import floats
from ..build.vectors import get, load, put, store
from .activations import activate, gated
from .linear_job import RESIDUAL, Y, gates


@jit
def add_bias(job: Any, m: int, first: int, n: int, products: Any, at: int) -> None:
    """Add the bias of n rows of matrix m, from row `first` on, to the products from `products[at]` on."""
    if job[m + BIAS] != 0:
        bias = floats(job[m + BIAS] + 4 * first)
        for r in range(n):
            put(products, at + r, get(products, at + r) + get(bias, r))


@jit
def gate_row(job: Any, m: int, first: int, n: int, products: Any, at: int, apart: int) -> None:
    """Replace n products of the gate, matrix m, by `activation(gate) * up`; those of up are `apart` elements later.

    Both are from row `first` of their matrix on, without their biases, and padded to whole vectors.
    """
    add_bias(job, m, first, n, products, at)
    add_bias(job, m + WIDTH, first, n, products, at + apart)
    for r in range(at, at + n, LANES):
        store(products, r, gated(job[ACTIVATION], load(products, r), load(products, r + apart)))


@jit
def put_row(job: Any, m: int, t: int, first: int, n: int, products: Any, at: int) -> None:
    """Write `activation(product + bias) + residual` of input row t and n rows of matrix m, from row `first` on.

    With a gate, the products are results of `gate_row`. They begin at `products[at]`, are padded to whole vectors, and
    are changed in place.
    """
    place = 4 * (t * job[N] + job[m + COLUMN] + first)
    y = floats(job[Y] + place)
    if not gates(job):
        add_bias(job, m, first, n, products, at)
        if job[ACTIVATION] != 0:
            for r in range(at, at + n, LANES):
                store(products, r, activate(job[ACTIVATION], load(products, r)))
    if job[RESIDUAL] != 0:
        residual = floats(job[RESIDUAL] + place)
        for r in range(n):
            put(y, r, get(products, at + r) + get(residual, r))
    else:
        for r in range(n):
            put(y, r, get(products, at + r))
