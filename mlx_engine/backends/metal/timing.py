"""Time the tunings of a Metal kernel: interleaved rounds over copies of the weights that no cache holds."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_engine.kernels.metal.layout import StoredMatrix
from mlx_engine.kernels.metal.rows import Tuning
from mlx_engine.observe.log import LOGGER

# Larger than any GPU's caches: with so many copies, each is read from memory, as a model's layers are.
COLD_BYTES = 256 << 20
ROUNDS = 5
# The relative speedup over the default tuning that is taken for more than noise.
MARGIN = 0.02


def fastest(samples: Mapping[Tuning, Sequence[float]], default: Tuning) -> Tuning:
    """Return the tuning with the smallest median, or the default if none ran or none is faster by more than MARGIN."""
    medians = {tuning: statistics.median(seconds) for tuning, seconds in samples.items()}
    best = min(medians, key=lambda tuning: medians[tuning], default=default)
    if default in medians and medians[default] * (1 - MARGIN) <= medians[best]:
        return default
    return best


def measured(kernel: Callable[..., Any], args: tuple[Any, ...], tunings: Sequence[Tuning]) -> dict[Tuning, list[float]]:
    """Seconds per launch with cold weights, `ROUNDS` of each tuning that the GPU takes.

    As in a model, each launch depends on the one before, because it reads its result.
    """
    sets = cold_sets(args)
    samples: dict[Tuning, list[float]] = {}
    for tuning in tunings:
        try:
            mx.eval(kernel(*sets[0], tuning=tuning))
        except (RuntimeError, ValueError) as error:  # too many threads for the registers that the kernel uses
            LOGGER.log(logging.DEBUG, "%s %s: %s", kernel.__name__, tuning, error)
            continue
        samples[tuning] = []
    for _ in range(ROUNDS):
        for tuning, seconds in samples.items():
            y = None
            for one in sets:
                y = kernel(*following(one, y), tuning=tuning)
            start = time.perf_counter()
            mx.eval(y)
            seconds.append((time.perf_counter() - start) / len(sets))
    del sets
    mx.clear_cache()
    return samples


def cold_sets(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments with enough copies of their matrices that a copy has left the caches before its next use."""
    nbytes = sum(a.nbytes for a in args if isinstance(a, StoredMatrix))
    sets = [args]
    for _ in range(-(-COLD_BYTES // nbytes) - 1):
        copied = tuple(_copy(a) if isinstance(a, StoredMatrix) else a for a in args)
        mx.eval([[a.wq, a.ws] for a in copied if isinstance(a, StoredMatrix)])
        sets.append(copied)
    return sets


def following(args: tuple[Any, ...], before: Any) -> tuple[Any, ...]:
    """Return the arguments with vectors replaced by views of the result before, if it is wide enough."""
    y = before[0] if isinstance(before, tuple) else before
    if y is None:
        return args
    return tuple(
        y[:, : a.shape[1]] if isinstance(a, mx.array) and a.ndim == 2 and a.shape[1] <= y.shape[1] else a for a in args
    )


def _copy(matrix: StoredMatrix) -> StoredMatrix:
    return StoredMatrix(matrix.layout, mx.array(matrix.wq) + 0, mx.array(matrix.ws) + 0)
