"""Memory bandwidth of Apple's chips: as specified, and as measured with a kernel that only reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import ExecutorName, Launch
from .experiment import Experiment
from .run import promise

# ---- timing with cold caches: consecutive launches read different memory ----

# Bytes that other launches read before a launch reads the same memory again: more than the caches of any chip.
COLD_BYTES = 256 << 20
# Limits of launches per sample: enough to hide the time of the first submission, few enough for small arrays.
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 512
SAMPLES, SECONDS = 5, 0.25


def nbytes(launch: Launch) -> int:
    """Return the bytes of all inputs and outputs."""
    outputs = zip(launch.output_shapes, launch.output_dtypes, strict=True)
    return sum(x.nbytes for x in launch.inputs) + sum(prod(shape) * dtype.size for shape, dtype in outputs)


def cold_inputs(inputs: Sequence[mx.array]) -> list[list[mx.array]]:
    """Return sets of copies of the arrays: together more bytes than a cache, but at most `MOST_LAUNCHES` sets."""
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
    """Return the seconds per launch; consecutive launches use different sets of inputs."""
    return seconds_per_call([partial(promise, replace(launch, inputs=inputs), executor) for inputs in sets])


def seconds_per_call(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds per call of functions with lazy results: the median of rounds that call all functions."""
    rounds = -(-LEAST_LAUNCHES // len(calls))
    mx.eval([call() for call in calls])
    samples: list[float] = []
    while len(samples) < SAMPLES or sum(samples) * len(calls) * rounds < SECONDS:
        started = time.perf_counter()
        mx.eval([call() for _ in range(rounds) for call in calls])
        samples.append((time.perf_counter() - started) / (rounds * len(calls)))
    return statistics.median(samples)


# GB/s by the device name that MLX reports; the largest one if a chip is sold with several bandwidths.
NOMINAL = {
    "Apple M1": 68.25,
    "Apple M1 Pro": 204.8,
    "Apple M1 Max": 409.6,
    "Apple M1 Ultra": 819.2,
    "Apple M2": 102.4,
    "Apple M2 Pro": 204.8,
    "Apple M2 Max": 409.6,
    "Apple M2 Ultra": 819.2,
    "Apple M3": 102.4,
    "Apple M3 Pro": 153.6,
    "Apple M3 Max": 409.6,
    "Apple M3 Ultra": 819.2,
    "Apple M4": 120.0,
    "Apple M4 Pro": 273.0,
    "Apple M4 Max": 546.0,
    "Apple M5": 153.6,
    "Apple M5 Pro": 307.0,
    "Apple M5 Max": 614.0,
}

# Bytes that `READ` reads. All copies together exceed any cache.
READ_BYTES = 64 << 20

READ = Experiment(
    name="plain_read",
    source="""
    // Sixteen loads of 16 bytes per thread; adjacent threads load adjacent bytes.
    const uint i = thread_position_in_grid.x;
    uint sum = 0u;
    for (uint load = 0u; load < 16u; load++) {
      const uint4 v = ((const device uint4*)x)[load * (N / 64u) + i];
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    y[i] = sum;
""",
    inputs={"x": "uint32 N"},
    outputs={"y": "uint32 N/64"},
    reference=lambda x, N: np.bitwise_xor.reduce(x.reshape(16, N // 64, 4), axis=(0, 2)),
    threads=lambda N: N // 64,
    threadgroup=256,
)


def chip() -> str:
    """Return the device name that MLX reports."""
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        return "no GPU"
    information: dict[str, Any] = mx.device_info()
    return str(information.get("device_name", "unknown GPU"))


def nominal_gbs() -> float | None:
    """Return the specified bandwidth of the chip; None if it is unknown."""
    return NOMINAL.get(chip())


@cache
def read_gbs(executor: ExecutorName) -> float:
    """Return the GB/s of `READ` on this machine; measured once."""
    launch, _ = READ.launch({"N": READ_BYTES // 4})
    return nbytes(launch) / seconds_per_launch(launch, cold_inputs(launch.inputs), executor) / 1e9
