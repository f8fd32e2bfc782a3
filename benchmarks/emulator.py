"""Time one emulated kernel call of a model's size, (1 x 1024) x (1024 x 3072), in each build of the emulator.

    python -m benchmarks.emulator            appends to benchmarks/results/emulator.jsonl, every sample kept

The whole call is timed, Python included. Every call copies the weights, as in a model. The builds are interleaved, so
that a slowdown of the machine affects all of them.
"""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
import numpy as np

from benchmarks.log import FOLDER, Log
from kernels.blocks import Q8_0
from kernels.lab.run import run
from kernels.launch import planned
from kernels.metal.formats import split_q8_0
from kernels.metal.matvec import matvec

RESULTS = FOLDER / "emulator.jsonl"

BUILDS = ("spaces", "undefined", "races")
SHAPE = (3072, 1024)
ROUNDS = 31


def main() -> None:
    """Measure all builds."""
    log = Log("emulator", RESULTS)
    rng = np.random.default_rng(0)
    blocks = np.zeros(SHAPE[0] * SHAPE[1] // 32, dtype=Q8_0)
    blocks["d"], blocks["qs"] = 0.01, rng.integers(-127, 128, (len(blocks), 32))
    weight = split_q8_0(blocks.view(np.uint8), SHAPE)
    with planned() as launches:
        matvec(mx.array(rng.standard_normal((1, SHAPE[1])).astype(np.float32)), weight)
    samples: dict[str, list[float]] = {build: [] for build in BUILDS}
    for build in BUILDS:  # the first call compiles
        run(launches[0], "emulator", build=build)
    for _ in range(ROUNDS):
        for build in BUILDS:
            start = time.perf_counter()
            run(launches[0], "emulator", build=build)
            samples[build].append((time.perf_counter() - start) * 1e3)
    for build in BUILDS:
        log.append({"kernel": "matvec", "shape": SHAPE, "build": build, "samples_ms": samples[build]})
        print(f"{build}: {statistics.median(samples[build]):.2f} ms")


if __name__ == "__main__":
    main()
