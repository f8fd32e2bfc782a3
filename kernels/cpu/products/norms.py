"""RMS norm, layer norm and rotary embedding of rows. References: `tests/cpu_reference.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.jit import entry, jit
from ..build.layout import LANES
from ..build.memory import floats, number, words
from ..build.vectors import add, div, fma, get, load, mul, put, splat, store, sub, total, zeros
from ..formats.float32 import dot


@jit
def rms_norm(x: Any, at: int, n: int, weight: Any, eps: Any, out: Any, to: int) -> None:
    """Write `weight * x[at:] / sqrt(mean(x**2) + eps)`, n elements, to `out[to:]`; out may be x."""
    # The root is computed in float64, because its error affects the whole row.
    root = np.float32(np.sqrt(np.float64(dot(x, at, x, at, n)) / n + eps))
    whole, divisor = n // LANES * LANES, splat(root)
    for i in range(0, whole, LANES):
        store(out, to + i, mul(load(weight, i), div(load(x, at + i), divisor)))
    for i in range(whole, n):
        put(out, to + i, get(weight, i) * (get(x, at + i) / root))


@jit
def layer_norm(x: Any, at: int, n: int, weight: Any, bias: Any, eps: Any, out: Any, to: int) -> None:
    """Write `weight * (x[at:] - mean) / sqrt(variance + eps) + bias`, n elements, to `out[to:]`; out may be x."""
    whole, sums = n // LANES * LANES, zeros()
    for i in range(0, whole, LANES):
        sums = add(sums, load(x, at + i))
    sum_ = np.float64(total(sums))
    for i in range(whole, n):
        sum_ += get(x, at + i)
    mean = np.float32(sum_ / n)
    for i in range(0, whole, LANES):
        store(out, to + i, sub(load(x, at + i), splat(mean)))
    for i in range(whole, n):
        put(out, to + i, get(x, at + i) - mean)
    root = np.float32(np.sqrt(np.float64(dot(out, to, out, to, n)) / n + eps))
    for i in range(0, whole, LANES):
        store(out, to + i, fma(load(weight, i), div(load(out, to + i), splat(root)), load(bias, i)))
    for i in range(whole, n):
        put(out, to + i, get(weight, i) * (get(out, to + i) / root) + get(bias, i))


@jit
def norm(x: Any, at: int, n: int, weight: int, bias: int, eps: Any, out: Any, to: int) -> None:
    """Apply the RMS norm if `bias` is 0, else the layer norm; `weight` and `bias` are addresses."""
    if bias != 0:
        layer_norm(x, at, n, floats(weight), floats(bias), eps, out, to)
    else:
        rms_norm(x, at, n, floats(weight), eps, out, to)


@jit
def rotate(x: Any, at: int, half: int, cos: Any, sin: Any, row: int, out: Any, to: int) -> None:
    """Rotate pairs (j, j + half) by angles whose cosines and sines are `cos[row:]` and `sin[row:]`; out may be x."""
    whole = half // LANES * LANES
    for j in range(0, whole, LANES):
        a, b, c, s = load(x, at + j), load(x, at + half + j), load(cos, row + j), load(sin, row + j)
        store(out, to + j, fma(a, c, mul(b, sub(zeros(), s))))
        store(out, to + half + j, fma(b, c, mul(a, s)))
    for j in range(whole, half):
        p, q, u, v = get(x, at + j), get(x, at + half + j), get(cos, row + j), get(sin, row + j)
        put(out, to + j, p * u - q * v)
        put(out, to + half + j, q * u + p * v)


@jit
def norm_rotate(
    x: Any, at: int, n_heads: int, width: int, weight: Any, eps: Any, cos: Any, sin: Any, row: int, out: Any, to: int,
    step: int,
) -> None:  # fmt: skip
    """Norm one token's heads if eps >= 0, and rotate them; heads are `width` elements apart in x, and `step` in out."""
    for h in range(n_heads):
        source, target = at + h * width, to + h * step
        if eps >= 0:
            rms_norm(x, source, width, weight, eps, out, target)
            rotate(out, target, width // 2, cos, sin, row, out, target)
        else:
            rotate(x, source, width // 2, cos, sin, row, out, target)


# ---- `Backend.norm_add` (`mlx_engine/backends/base.py`): norm rows, add a residual, or both ----


@jit
def norm_rows(x: Any, n_rows: int, width: int, weight: int, bias: int, eps: Any, out: Any) -> None:
    """Norm contiguous rows; out may be x."""
    for t in range(n_rows):
        norm(x, t * width, width, weight, bias, eps, out, t * width)


@entry
def norm_add(address: int, of: int, n_rows: int, width: int, x: int, residual: int, out: int) -> None:
    """Write `residual + norm(x)` of contiguous rows, in one thread.

    `of` is the address of the norm's three words: the address of its weight, its epsilon (bits of a float64), and the
    address of its bias (0 for an RMS norm). If `of` is 0, there is no norm. `x`, `residual` (or 0) and `out` are
    addresses of rows (n_rows, width); `out` must be neither `x` nor `residual`. `address` is not used.
    """
    y, added = floats(out), floats(residual)
    if of != 0:
        words_of = words(of)
        norm_rows(floats(x), n_rows, width, words_of[0], words_of[2], np.float32(number(words_of[1])), y)
    else:
        for i in range(n_rows * width):
            put(y, i, get(floats(x), i))
    if residual != 0:
        for i in range(n_rows * width):
            put(y, i, get(added, i) + get(y, i))
