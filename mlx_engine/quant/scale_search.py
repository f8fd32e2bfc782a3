"""Search for scales, minima and quants with a small squared error, to quantise to Q4_K, Q5_K, Q6_K, Q5_0 and Q5_1.

For fixed quants, the best scale and minimum of a group are the solution of a weighted least-squares problem with two
unknowns. For a fixed scale and minimum, the best quants follow by rounding. The search rounds the weights with several
trial scales, solves the least-squares problem for each, and keeps the best solution. For types with minima, it then
rounds the weights with this solution, and solves the problem again. In K-quants, scales and minima are finally rounded
to integers times the block's factors. The neighbouring integers are tried, too, because they can give a smaller error.
If a weight is NaN or infinite, ValueError is raised.

Arrays have one column per group: (weights of a group, groups). A sum over a group adds the rows one by one, in an order
that does not depend on the vector width of the processor, so the same weights give the same bytes everywhere. The
weights of a group are first divided by their largest magnitude, so that no product overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.packing import inverse

Floats = NDArray[np.float32]
# A group without a magnitude above `SMALLEST` is stored as zeros: its scale would round to 0, because the smallest
# positive float16 number is 6e-8. Magnitudes above `LARGEST` are clipped to `LARGEST`. This is far above the largest
# weight that any block can store, about 3e8 (Q6_K).
SMALLEST, LARGEST = np.float32(1e-20), np.float32(1e30)
LARGEST_HALF = np.float32(65504)
# float16 numbers below 2**-14 are subnormal: multiples of 2**-24. In Q6_K, weights around 0.1 have such small factors.
SUBNORMALS, SUBNORMAL_STEP = np.float32(2.0**-14), np.float32(2.0**-24)
# The largest 6-bit scale or minimum of a group in Q4_K and Q5_K.
MOST = np.float32(63)
ZERO, ONE = np.float32(0), np.float32(1)
# For each `trial` in `TRIALS`, a trial scale is the range of a group divided by `n + trial`, where n is the largest
# magnitude of a quant. For types without minima, the range is the largest magnitude of a weight. With smaller scales,
# small weights are rounded better, but the largest ones are clipped. With trials between -1 and 1 only, the errors of
# normally distributed weights would be 1 to 3 % larger.
TRIALS = np.arange(-8, 9, dtype=np.float32) / np.float32(5)


@dataclass(frozen=True)
class Affine:
    """n blocks of groups of weights: `weight = d * scale * quant - dmin * minimum`.

    `d` and `dmin` are float16 (n,). `scales` and `minima` are uint8 (n, groups). `quants` are uint8 (n, groups, weights
    of a group).
    """

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    scales: NDArray[np.uint8]
    minima: NDArray[np.uint8]
    quants: NDArray[np.uint8]


@dataclass(frozen=True)
class Symmetric:
    """n blocks of groups: `weight = d * scale * quant`. Shapes are as in `Affine`; `scales` and `quants` are int8."""

    d: NDArray[np.float16]
    scales: NDArray[np.int8]
    quants: NDArray[np.int8]


class Groups:
    """Groups of `size` weights. Each column of `x` is a group, divided by its largest magnitude, the unit of the group.

    Attributes:
        x: (size, n_groups) the divided weights, from -1 to 1; zeros for a group whose unit is at most `SMALLEST`.
        unit: (n_groups,) the largest magnitude of each group, at most `LARGEST`.
        inverse: (n_groups,) 1 / unit; 0 for a group whose unit is at most `SMALLEST`.
        scratch: three arrays of the shape of `x`, for intermediate results.
    """

    def __init__(self, values: Floats, size: int) -> None:
        self.x = np.ascontiguousarray(values.reshape(-1, size).T)
        unit = np.abs(self.x).max(axis=0)
        if not np.isfinite(unit).all():
            raise ValueError("expected finite weights, found NaN or infinity")
        if unit.max(initial=0) > LARGEST:
            np.clip(self.x, -LARGEST, LARGEST, out=self.x)
        self.unit = np.minimum(unit, LARGEST)
        self.inverse = inverse(np.where(self.unit > SMALLEST, self.unit, ZERO))
        self.x *= self.inverse
        self.scratch = np.empty_like(self.x), np.empty_like(self.x), np.empty_like(self.x)


def affine(values: Floats, n_max: int) -> Affine:
    """Quantise (n, 256) weights in groups of 32, with quants from 0 to `n_max` and scales and minima from 0 to 63."""
    n, groups = len(values), Groups(values, 32)
    importance = _importance(groups)
    scale, minimum = _affine_fit(groups, importance, n_max)
    d, scales, units = _rounded(scale * groups.unit, groups.inverse)
    dmin, minima, min_units = _rounded(minimum * groups.unit, groups.inverse)
    best, found = np.full(len(scale), np.inf, np.float32), (scales, minima)
    for scales_by, minima_by in product((0, 1, -1), repeat=2):
        tried = np.clip(scales + np.float32(scales_by), 0, MOST), np.clip(minima + np.float32(minima_by), 0, MOST)
        error = _affine_error(groups, importance, n_max, tried[0] * units, tried[1] * min_units)
        is_better = error < best
        best = np.where(is_better, error, best)
        found = np.where(is_better, tried[0], found[0]), np.where(is_better, tried[1], found[1])
    quants = _affine_quants(groups, n_max, found[0] * units, found[1] * min_units)
    whole = [part.astype(np.uint8).reshape(n, -1) for part in found]
    return Affine(d, dmin, whole[0], whole[1], np.ascontiguousarray(quants.T).astype(np.uint8).reshape(n, -1, 32))


def _rounded(parts: Floats, inverse_units: Floats) -> tuple[NDArray[np.float16], Floats, Floats]:
    """Round the scales or the minima (8 n,) of n blocks to whole numbers times a factor per block.

    Return the factors (n,), the whole numbers (8 n,), and for each group the factor divided by the group's unit (8 n,).
    """
    largest: Floats = parts.reshape(-1, 8).max(axis=1)
    d = _factor(largest, MOST)
    wide = np.repeat(d.astype(np.float32), 8)
    return d, np.minimum(np.rint(parts * inverse(wide)), MOST), wide * inverse_units


def affine_groups(values: Floats, n_max: int) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.uint8]]:
    """Quantise (n, 32) weights as `d * quant + m`: return `d` (n,), `m` (n,) and quants (n, 32) from 0 to `n_max`."""
    groups = Groups(values, 32)
    scale, minimum = _affine_fit(groups, _importance(groups), n_max, is_signed=True)
    d, m = _half(scale * groups.unit), _half(-minimum * groups.unit)
    scale, minimum = d.astype(np.float32) * groups.inverse, m.astype(np.float32) * -groups.inverse
    return d, m, np.ascontiguousarray(_affine_quants(groups, n_max, scale, minimum).T).astype(np.uint8)


def _importance(groups: Groups) -> Floats:
    """Return the importance of each weight, (size, n_groups): its magnitude plus the group's RMS.

    The squared error of a weight is multiplied by its importance, because large weights contribute more to activations.
    llama.cpp uses the same importance for Q4_K and Q5_K.
    """
    importance = np.abs(groups.x)
    importance += np.sqrt(np.square(groups.x).sum(axis=0) / np.float32(len(groups.x)))
    importance[:, groups.inverse == 0] = ONE
    return importance


def _affine_fit(groups: Groups, importance: Floats, n_max: int, *, is_signed: bool = False) -> tuple[Floats, Floats]:
    """Return the best scales and minima that were found, (n_groups,) each, divided by the unit of the group.

    Minima are subtracted (see `Affine`). They may be negative only with `is_signed`.
    """
    low = groups.x.min(axis=0)
    low = low if is_signed else np.minimum(low, ZERO)
    from_low = groups.x - low
    from_low *= inverse(from_low.max(axis=0))
    sums = importance.sum(axis=0), (importance * groups.x).sum(axis=0)
    best, scale, minimum = np.full(len(low), -np.inf, np.float32), np.zeros_like(low), -low
    quants = groups.scratch[2]
    for trial in TRIALS:
        np.multiply(from_low, np.float32(n_max) + trial, out=quants)
        np.rint(quants, out=quants)
        np.minimum(quants, np.float32(n_max), out=quants)
        found, gain = _solve(groups, importance, sums, quants, is_signed=is_signed)
        is_better = gain > best
        best = np.where(is_better, gain, best)
        scale, minimum = (np.where(is_better, new, old) for new, old in zip(found, (scale, minimum), strict=True))
    quants = _affine_quants(groups, n_max, scale, minimum)
    found, gain = _solve(groups, importance, sums, quants, is_signed=is_signed)
    is_better = gain > best
    return np.where(is_better, found[0], scale), np.where(is_better, found[1], minimum)


def _solve(
    groups: Groups, importance: Floats, sums: tuple[Floats, Floats], quants: Floats, *, is_signed: bool
) -> tuple[tuple[Floats, Floats], Floats]:
    """Return the best scales and minima for given quants, and the reduction of the error, (n_groups,) each.

    The reduction is the error of storing the whole group as zeros, minus the error of the solution. `quants` are whole
    numbers (32, n_groups); `sums` are the sums of `importance` and of `importance * x` over each group.
    """
    w, wx = sums
    first, second, _ = groups.scratch
    wq = np.multiply(importance, quants, out=first).sum(axis=0)
    wqx = np.multiply(first, groups.x, out=second).sum(axis=0)
    wqq = np.multiply(first, quants, out=first).sum(axis=0)
    factor = inverse(np.maximum(w * wqq - wq * wq, ZERO))
    scale = (w * wqx - wx * wq) * factor
    minimum = np.where(factor > 0, (wq * wqx - wqq * wx) * factor, -wx / w)
    if not is_signed:
        # If the minimum would be negative, set it to 0, and solve the least-squares problem for the scale alone.
        scale = np.where(minimum < 0, wqx * inverse(wqq), scale)
        scale, minimum = np.maximum(scale, ZERO), np.maximum(minimum, ZERO)
    gain = scale * (wqx + wqx - scale * wqq) + minimum * (scale * (wq + wq) - (wx + wx) - minimum * w)
    return (scale, minimum), gain


def _affine_quants(groups: Groups, n_max: int, scale: Floats, minimum: Floats) -> Floats:
    """Return the quants with the smallest errors for `groups.x`, (32, n_groups), in the last scratch array."""
    quants = np.add(groups.x, minimum, out=groups.scratch[2])
    quants *= inverse(scale)
    np.rint(quants, out=quants)
    return np.clip(quants, 0, n_max, out=quants)


def _affine_error(groups: Groups, importance: Floats, n_max: int, scale: Floats, minimum: Floats) -> Floats:
    """Return the weighted squared error of each group, (n_groups,), with the best quants for the scales and minima."""
    return _weighted_error(_affine_quants(groups, n_max, scale, minimum), scale, minimum, groups.x, importance)


def _weighted_error(
    quants: Floats, scale: Floats, minimum: Floats | np.float32, x: Floats, importance: Floats
) -> Floats:
    """Return the weighted squared error of each group, (n_groups,). `quants` is overwritten."""
    error = quants
    error *= scale
    error -= minimum
    error -= x
    error *= error
    error *= importance
    sums: Floats = error.sum(axis=0)
    return sums


def symmetric(values: Floats) -> Symmetric:
    """Quantise (n, 256) weights in groups of 16, with quants from -32 to 31 and scales from -128 to 127.

    The importance of a weight (see `_importance`) is here the square of the weight, as in llama.cpp.
    """
    n, groups = len(values), Groups(values, 16)
    importance = np.square(groups.x)
    scale = (_symmetric_fit(groups, importance, 32) * groups.unit).reshape(n, -1)
    extreme: Floats = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = _factor(extreme, np.float32(-128))
    wide_d = np.repeat(d.astype(np.float32), 16) * groups.inverse
    scales = np.clip(np.rint(scale * inverse(d.astype(np.float32))[:, None]), -128, 127).reshape(-1)
    best, found = _symmetric_error(groups, importance, scales * wide_d), scales
    for by in (1, -1):
        tried = np.clip(scales + np.float32(by), -128, 127)
        error = _symmetric_error(groups, importance, tried * wide_d)
        is_better = error < best
        best, found = np.where(is_better, error, best), np.where(is_better, tried, found)
    quants = np.ascontiguousarray(_symmetric_quants(groups, found * wide_d).T)
    return Symmetric(d, found.astype(np.int8).reshape(n, -1), quants.astype(np.int8).reshape(n, -1, 16))


def _symmetric_fit(groups: Groups, importance: Floats, most: int) -> Floats:
    """Return the best scales that were found, (n_groups,), divided by the unit of the group.

    Quants are from -most to most - 1. A scale may be negative, so that the weight of largest magnitude can have the
    quant -most.
    """
    sign = np.where(groups.x.max(axis=0) + groups.x.min(axis=0) > 0, -ONE, ONE)
    turned = groups.x * sign
    best, scale = np.full(turned.shape[1], np.inf, np.float32), np.zeros(turned.shape[1], np.float32)
    first, second, quants = groups.scratch
    for trial in TRIALS:
        np.multiply(turned, np.float32(most) + trial, out=quants)
        np.rint(quants, out=quants)
        np.clip(quants, -most, most - 1, out=quants)
        np.multiply(importance, quants, out=first)
        wqx = np.multiply(first, turned, out=second).sum(axis=0)
        wqq = np.multiply(first, quants, out=first).sum(axis=0)
        found = wqx * inverse(wqq)
        # Compare the errors, not their reductions `wqx * found`: if one weight of the group is much larger than the
        # others, several trials have the same reduction in float32.
        error = _weighted_error(quants, found, ZERO, turned, importance)
        is_better = error < best
        best, scale = np.where(is_better, error, best), np.where(is_better, found, scale)
    return scale * sign


def symmetric_groups(values: Floats, most: int) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Quantise (n, 32) weights as `d * quant`: return `d` (n,) and quants (n, 32) from -most to most - 1."""
    groups = Groups(values, 32)
    d = _half(_symmetric_fit(groups, _importance(groups), most) * groups.unit)
    quants = _symmetric_quants(groups, d.astype(np.float32) * groups.inverse, most)
    return d, np.ascontiguousarray(quants.T).astype(np.int8)


def _symmetric_quants(groups: Groups, scale: Floats, most: int = 32) -> Floats:
    """Return the quants with the smallest errors for `groups.x`, (size, n_groups), in the last scratch array."""
    quants = np.multiply(groups.x, inverse(scale), out=groups.scratch[2])
    np.rint(quants, out=quants)
    return np.clip(quants, -most, most - 1, out=quants)


def _symmetric_error(groups: Groups, importance: Floats, scale: Floats) -> Floats:
    """Return the weighted squared error of each group, (n_groups,), with the best quants for these scales."""
    return _weighted_error(_symmetric_quants(groups, scale), scale, ZERO, groups.x, importance)


def _factor(largest: Floats, most: np.float32) -> NDArray[np.float16]:
    """Return the float16 factor of each block: `largest / most`, or a slightly larger factor if this quotient is tiny.

    `largest` has the scale or minimum of largest magnitude in each block, and `most` is the integer that represents it.
    Tiny float16 numbers are so coarse that the quotient may be rounded to a much smaller factor. If `largest / factor`
    then rounds to more than `most` in magnitude, the largest weights would be clipped, so the smallest factor that
    clips no weight is returned.
    """
    exact = largest / most
    least = np.ceil(np.abs(largest / (most + np.copysign(np.float32(0.5), most))) / SUBNORMAL_STEP) * SUBNORMAL_STEP
    nearest = _half(exact).astype(np.float32)
    return _half(np.where(np.abs(nearest) < np.minimum(least, SUBNORMALS), np.copysign(least, exact), nearest))


def _half(x: Floats) -> NDArray[np.float16]:
    """Return x as float16. Numbers that are too large become the largest finite float16 number."""
    return np.clip(x, -LARGEST_HALF, LARGEST_HALF).astype(np.float16)
