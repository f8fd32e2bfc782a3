"""How long launches take on a GPU, when each of a row reads other memory."""

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

from kernels.lab.run import promise
from kernels.launch import ExecutorName, Launch

# Caches of the largest chips hold less: launches in a row read so many bytes before one reads the same again.
COLD_BYTES = 256 << 20
# Launches of one sample: enough to hide how long it takes to hand over the first, few enough for small arrays.
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 512
SAMPLES, SECONDS = 5, 0.25


def nbytes(launch: Launch) -> int:
    """Bytes of all inputs and outputs."""
    outputs = zip(launch.output_shapes, launch.output_dtypes, strict=True)
    return sum(x.nbytes for x in launch.inputs) + sum(prod(shape) * dtype.size for shape, dtype in outputs)


def cold_inputs(inputs: Sequence[mx.array]) -> list[list[mx.array]]:
    """The arrays and copies of them: more than a cache holds, but no more than `MOST_LAUNCHES` sets of them."""
    read = sum(x.nbytes for x in inputs)
    copies = min(max(-(-COLD_BYTES // max(read, 1)), 2), MOST_LAUNCHES)
    return [list(inputs), *([copy_of(x) for x in inputs] for _ in range(copies - 1))]


def are_cold(sets: Sequence[Sequence[mx.array]]) -> bool:
    """Whether together they are more than a cache holds."""
    return sum(x.nbytes for inputs in sets for x in inputs) >= COLD_BYTES


def copy_of(x: mx.array) -> mx.array:
    """The same numbers elsewhere in memory."""
    if x.dtype == mx.bfloat16:
        return mx.array(np.array(x.astype(mx.float32))).astype(mx.bfloat16)
    return mx.array(np.array(x))


def seconds_per_launch(launch: Launch, sets: Sequence[list[mx.array]], executor: ExecutorName) -> float:
    """The launch with each set of inputs in turn."""
    return seconds_per_call([partial(promise, replace(launch, inputs=inputs), executor) for inputs in sets])


def seconds_per_call(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds per call of what gives promises: the median of rounds in which all calls are evaluated together."""
    rounds = -(-LEAST_LAUNCHES // len(calls))
    mx.eval([call() for call in calls])
    samples: list[float] = []
    while len(samples) < SAMPLES or sum(samples) * len(calls) * rounds < SECONDS:
        started = time.perf_counter()
        mx.eval([call() for _ in range(rounds) for call in calls])
        samples.append((time.perf_counter() - started) / (rounds * len(calls)))
    return statistics.median(samples)
