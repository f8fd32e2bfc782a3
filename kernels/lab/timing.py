"""Timing of launches on a GPU with cold caches: consecutive launches read different memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import ExecutorName, Launch
from .run import promise

# Bytes that consecutive launches read before one reads the same memory again: more than the caches of any chip.
COLD_BYTES = 256 << 20
# Launches per sample: enough to hide the time to submit the first, few enough for small arrays.
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 512
SAMPLES, SECONDS = 5, 0.25


def nbytes(launch: Launch) -> int:
    """Return the bytes of all inputs and outputs."""
    outputs = zip(launch.output_shapes, launch.output_dtypes, strict=True)
    return sum(x.nbytes for x in launch.inputs) + sum(prod(shape) * dtype.size for shape, dtype in outputs)


def cold_inputs(inputs: Sequence[mx.array]) -> list[list[mx.array]]:
    """Return the arrays and copies of them: more bytes than a cache, but at most `MOST_LAUNCHES` sets."""
    read = sum(x.nbytes for x in inputs)
    copies = min(max(-(-COLD_BYTES // max(read, 1)), 2), MOST_LAUNCHES)
    return [list(inputs), *([copy_of(x) for x in inputs] for _ in range(copies - 1))]


def are_cold(sets: Sequence[Sequence[mx.array]]) -> bool:
    """Return whether the sets together exceed a cache."""
    return sum(x.nbytes for inputs in sets for x in inputs) >= COLD_BYTES


def copy_of(x: mx.array) -> mx.array:
    """Return a copy in other memory."""
    if x.dtype == mx.bfloat16:
        return mx.array(np.array(x.astype(mx.float32))).astype(mx.bfloat16)
    return mx.array(np.array(x))


def seconds_per_launch(launch: Launch, sets: Sequence[list[mx.array]], executor: ExecutorName) -> float:
    """Return the seconds per launch, with each set of inputs in turn."""
    return seconds_per_call([partial(promise, replace(launch, inputs=inputs), executor) for inputs in sets])


def seconds_per_call(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds per call of functions with lazy results: the median of rounds that evaluate all together."""
    rounds = -(-LEAST_LAUNCHES // len(calls))
    mx.eval([call() for call in calls])
    samples: list[float] = []
    while len(samples) < SAMPLES or sum(samples) * len(calls) * rounds < SECONDS:
        started = time.perf_counter()
        mx.eval([call() for _ in range(rounds) for call in calls])
        samples.append((time.perf_counter() - started) / (rounds * len(calls)))
    return statistics.median(samples)
