"""Memory bandwidth of Apple's chips: as specified, and as measured with a kernel that only reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import ExecutorName
from .experiment import Experiment
from .timing import cold_inputs, nbytes, seconds_per_launch

# GB/s by the device name that MLX reports. For a chip that is sold with several memories, the fastest.
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

# Bytes that `READ` reads: with its copies more than any cache holds.
READ_BYTES = 64 << 20

READ = Experiment(
    name="plain_read",
    source="""
    // Sixteen loads of 16 bytes per thread, neighbours side by side.
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
