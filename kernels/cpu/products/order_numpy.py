"""Define in NumPy, to the last bit, the results of dot products, attention and sums of exponentials.

The compiled kernels (`tile.py`, `attention.py`, `sum_exp.py`) must give the same bits for any number of rows, on any
processor. Arrays are float32, except for sums of exponentials.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..build.layout import BLOCK, LANES, STRETCH

Floats = NDArray[np.float32]


def fma(a: Floats, b: Floats, c: Floats | np.float32) -> Floats:
    """Return `a * b + c`, rounded once.

    The product is exact in float64. If the sum is not exact, it is rounded to odd: of the two adjacent float64s, the
    one whose last bit is 1 is taken. Rounding the result to float32 then gives the correctly rounded sum, because
    float64 has at least two more bits than float32 (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
    2008).
    """
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    added = total - product
    error = (product - (total - added)) + (addend - added)
    is_even = total.view(np.int64) & 1 == 0
    other = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(is_even & (error != 0), other, total).astype(np.float32)


def halves(sums: Floats) -> Floats:
    """Return the sum over the last axis, of length 2**n: add its two halves until one element is left."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return np.asarray(sums[..., 0])


def dot(weights: Floats, x: Floats) -> Floats:
    """Return the dot products over the last axis, in the order that `tile.py` defines; other axes are broadcast."""
    shape = np.broadcast_shapes(weights.shape, x.shape)
    # Pad with zeros to whole vectors; zeros change no sum.
    missing = [(0, 0)] * (len(shape) - 1) + [(0, -shape[-1] % LANES)]
    weights, x = (np.pad(np.broadcast_to(a, shape), missing) for a in (weights, x))
    total = np.zeros(shape[:-1], dtype=np.float32)
    for first in range(0, shape[-1], STRETCH):
        sums = np.zeros((*shape[:-1], LANES), dtype=np.float32)
        for column in range(first, min(first + STRETCH, weights.shape[-1]), LANES):
            sums = fma(weights[..., column : column + LANES], x[..., column : column + LANES], sums)
        total = total + halves(sums)
    return total


def sum_weighted(weights: Floats, rows: Floats) -> Floats:
    """Return the weighted sums (..., E) of rows (..., n, E) with weights (..., n), added in the order of the rows."""
    shape = np.broadcast_shapes((*weights.shape, 1), rows.shape)
    sums = np.zeros((*shape[:-2], shape[-1]), dtype=np.float32)
    for j in range(shape[-2]):
        sums = fma(weights[..., j, None], rows[..., j, :], sums)
    return sums


def exp2_below(x: Floats) -> Floats:
    """Return `2**x` for x <= 0 as `exponentials.exp2_below` computes it: a Taylor polynomial times a power of 2."""
    x = np.maximum(x, np.float32(-127))
    n = np.rint(x)
    r = x - n
    power = np.full_like(x, math.log(2) ** 7 / math.factorial(7))
    for k in range(6, -1, -1):
        power = fma(power, r, np.float32(math.log(2) ** k / math.factorial(k)))
    return (power.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)


def tanh(x: Floats) -> Floats:
    """Return `tanh(x)` as `exponentials.tanh` computes it."""
    x = np.clip(x + x, np.float32(-20), np.float32(20))
    n = np.rint(x * np.float32(1.4426950408889634))
    r = fma(n, np.full_like(x, -0.693359375), x)
    r = fma(n, np.full_like(x, 2.12194440054690583e-4), r)
    p = np.full_like(x, 1 / 5040)
    for k in range(6, 1, -1):
        p = fma(p, r, np.float32(1 / math.factorial(k)))
    p = fma(p, r * r, r)
    power = np.exp2(n)
    y = fma(p, power, power - np.float32(1))
    return y / (y + np.float32(2))


def attend(
    q: Floats, kv: Floats, window: int, scale: float, softcap: float = 0.0, sinks: Floats | None = None
) -> Floats:
    """Return (T, H, E) attention of the last T tokens over keys and values.

    Args:
        q: (T, H, E).
        kv: (2, G, S, E): keys, then values, from position 0 on.
        window: number of latest tokens that a query attends to; 0 means all. With -C, positions are cut into chunks of
            C tokens, and a query attends only to the tokens of its chunk.
        scale: factor of the scores.
        softcap: the cap of the scores; 0 means none.
        sinks: (H,), an additional score for each query head, without a key or a value; None if there are none.
    """
    (n_tokens, n_heads, width), n_kv_heads = q.shape, kv.shape[1]
    out = np.empty_like(q)
    for t in range(n_tokens):
        end = kv.shape[2] - n_tokens + 1 + t
        begin = (end - 1) // -window * -window if window < 0 else max(0, end - window) if window else 0
        heads = q[t].reshape(n_kv_heads, n_heads // n_kv_heads, 1, width)
        outer, inner = (softcap, scale / softcap) if softcap else (scale, 0.0)
        factors = np.float32(outer / math.log(2)), np.float32(inner)
        own = None if sinks is None else sinks.reshape(n_kv_heads, -1) * np.float32(1.4426950408889634)
        out[t] = _attend_token(heads, kv[:, :, None], begin, end, factors, own)
    return out


def _attend_token(
    q: Floats, kv: Floats, begin: int, end: int, factors: tuple[np.float32, np.float32], sinks: Floats | None
) -> Floats:
    """Return (H, E) attention of one token over keys [begin, end).

    q is (G, H / G, 1, E), kv is (2, G, 1, S, E), and sinks are (G, H / G). `factors` are (scale, inner): a score is
    `scale * tanh(inner * dot)`, or `scale * dot` if inner is 0. Scores and sinks include the factor 1 / ln 2, because
    weights are computed as `2**score`.
    """
    scale, inner = factors
    largest = np.full(q.shape[:2], -np.inf, dtype=np.float32)
    divisor, sums = np.zeros(q.shape[:2], dtype=np.float32), np.zeros((*q.shape[:2], q.shape[3]), dtype=np.float32)
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        first = block * BLOCK
        seen = slice(max(begin, first), min(end, first + BLOCK))
        scores = dot(kv[0][..., seen, :], q)
        scores = (tanh(scores * inner) if inner else scores) * scale
        found = scores.max(axis=-1)
        weights = exp2_below(scores - np.maximum(found, np.float32(-3e38))[..., None])
        # Lane j % 16 of the sum of weights adds the weight of key j of the block.
        places = np.zeros((*q.shape[:2], BLOCK), dtype=np.float32)
        places[..., seen.start - first : seen.stop - first] = weights
        by_lane = np.zeros((*q.shape[:2], LANES), dtype=np.float32)
        for j in range(0, BLOCK, LANES):
            by_lane = by_lane + places[..., j : j + LANES]
        # Add the sums of this block to those of the previous blocks.
        joined = np.maximum(largest, found)
        old, new = exp2_below(largest - joined), exp2_below(found - joined)
        sums = fma(sum_weighted(weights, kv[1][..., seen, :]), new[..., None], sums * old[..., None])
        divisor, largest = fma(halves(by_lane), new, divisor * old), joined
    if sinks is not None:
        joined = np.maximum(largest, sinks)
        old, new = exp2_below(largest - joined), exp2_below(sinks - joined)
        sums, divisor = sums * old[..., None], new + divisor * old
    return np.asarray(sums / divisor[..., None], dtype=np.float32).reshape(-1, q.shape[3])


# ---- sums of exponentials: the reference of `sum_exp.py`, and the constants that both use ----

# e**LEAST replaces smaller exponentials, some of which would be subnormal numbers.
LEAST = -700.0
LOG2_E = 1.4426950408889634
# Adding this number to a float64 rounds the float64 to an integer, because the sum is so large that its last bit stands
# for 1. The low bits of the sum are the integer, in two's complement.
ROUNDER = 1.5 * 2.0**52

# 2**r is computed as the Taylor polynomial of degree 6 of 2**(r / 8), squared three times: relative error below 5e-13.
SQUARINGS = 3


def _taylor(degree: int) -> tuple[float, ...]:
    # Powers are computed by multiplication, because the C library's `pow` may round differently on another system.
    found = [1.0]
    for k in range(1, degree + 1):
        found.append(found[-1] * (0.6931471805599453 / 2**SQUARINGS) / k)
    return tuple(found)


COEFFICIENTS = _taylor(6)

# Number of elements that are processed at a time, so that temporary arrays fit into the L2 cache.
_STEP = 512 * LANES

Doubles = NDArray[np.float64]


def exp(x: Doubles) -> Doubles:
    """Return `e**x` for x <= 0, with a relative error below 1e-12; exactly 1 for 0, and `e**LEAST` below LEAST."""
    x = np.maximum(x, LEAST) * LOG2_E
    n = x + ROUNDER
    r = x - (n - ROUNDER)
    p = COEFFICIENTS[-1] * r
    for c in COEFFICIENTS[-2:0:-1]:
        p = (p + c) * r
    p += COEFFICIENTS[0]
    for _ in range(SQUARINGS):
        p *= p
    return np.asarray((p.view(np.int64) + (n.view(np.int64) << 52)).view(np.float64))


def sum_exp(row: NDArray[np.float32], top: float) -> float:
    """Return `sum(exp(row - top))` in float64; `row` is (V,) logits, and `top` the largest of them."""
    sums = np.zeros(LANES)
    for first in range(0, len(row), _STEP):
        part = row[first : first + _STEP]
        # Lanes without an element add e**LEAST, which changes no bit of the total, because the total is >= 1.
        padded = np.pad(part.astype(np.float64), (0, -len(part) % LANES), constant_values=-np.inf)
        terms = exp(padded - top).reshape(-1, LANES)
        terms[0] += sums
        sums = np.add.accumulate(terms)[-1]  # adds row after row of `terms`; `np.sum` has no specified order
    return _halves(sums)


def _halves(sums: Doubles) -> float:
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return float(sums[0])
