"""How much faster memory is read in several places in turns than in order: the measurement behind WAYS.

    python -m benchmarks.ways                appends to benchmarks/results/ways.jsonl, every sample kept

A plain read, and products of one vector with a matrix in Q8_0 and in float32, on all threads, each with a share of its
own that is larger than the processor's cache. The ways take turns. `kernels/cpu/layout.py` has the constant.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kernels import blocks
from kernels.cpu import float32, q8_0, roofline
from kernels.cpu.jit import jit
from kernels.cpu.layout import WAYS
from mlx_engine.backends.cores import usable_cores
from mlx_engine.bench.run import origin

RESULTS = Path(__file__).parent / "results" / "ways.jsonl"

N_COLUMNS = 1024
# Of each thread.
TOTAL = 96 * 2**20
ROUNDS = 25
IN_ORDER, IN_TURNS = "in_order", "in_turns"


@jit
def codes_in_turns(weights: Any, x: Any, y: Any, n_rows: int) -> None:
    """A Q8_0 matrix, four rows at a time."""
    apart, size = n_rows // WAYS, N_COLUMNS // 32 * q8_0.BLOCK_BYTES
    for r in range(apart):
        a, b, c, d = r * size, (r + apart) * size, (r + 2 * apart) * size, (r + 3 * apart) * size
        q8_0.four_rows(weights[a:], weights[b:], weights[c:], weights[d:], N_COLUMNS, x, y, r, apart)


@jit
def floats_in_turns(weights: Any, x: Any, y: Any, n_rows: int) -> None:
    """A float32 matrix, four rows at a time."""
    apart, size = n_rows // WAYS, N_COLUMNS
    for r in range(apart):
        a, b, c, d = r * size, (r + apart) * size, (r + 2 * apart) * size, (r + 3 * apart) * size
        float32.four_rows(weights[a:], weights[b:], weights[c:], weights[d:], N_COLUMNS, x, y, r, apart)


def main() -> None:
    """Measure all three."""
    threads = usable_cores()
    common = {**origin(), "threads": threads, "nbytes": TOTAL * threads}
    with RESULTS.open("a") as out, ThreadPoolExecutor(threads) as pool:
        for what, ways in kinds(threads).items():
            samples = measure(pool, ways)
            out.write(json.dumps({**common, "what": what, "samples_gbs": samples}) + "\n")
            print(what, {way: f"{statistics.median(rates):.1f} GB/s" for way, rates in samples.items()})


def kinds(threads: int) -> dict[str, dict[str, list[Callable[[], Any]]]]:
    """What is measured, each way of it, as a call per thread."""
    x = np.ones(N_COLUMNS, dtype=np.float32)
    made: dict[str, dict[str, list[Callable[[], Any]]]] = {}
    for _ in range(threads):
        codes = np.zeros(TOTAL // blocks.Q8_0.itemsize, dtype=blocks.Q8_0)
        codes["d"], codes["qs"] = 0.01, 1
        stored, dense = codes.view(np.uint8), np.ones(TOTAL // 4, dtype=np.float32)
        n_codes, n_dense = len(codes) * 32 // N_COLUMNS // WAYS * WAYS, len(dense) // N_COLUMNS
        y = np.empty(max(n_codes, n_dense), dtype=np.float32)
        words = dense.view(np.int64)
        add(made, "plain read", (roofline.read_in_order, words), (roofline.read, words))
        add(
            made, "Q8_0 product", (q8_0.matvec, stored, N_COLUMNS, x, y, 0, n_codes),
            (codes_in_turns, stored, x, y, n_codes),
        )  # fmt: skip
        add(
            made, "float32 product", (float32.matvec, dense, N_COLUMNS, x, y, 0, n_dense),
            (floats_in_turns, dense, x, y, n_dense),
        )  # fmt: skip
    return made


def add(made: dict[str, dict[str, list[Callable[[], Any]]]], what: str, *ways: tuple[Any, ...]) -> None:
    """One thread's calls."""
    for name, (function, *arguments) in zip((IN_ORDER, IN_TURNS), ways, strict=True):
        made.setdefault(what, {}).setdefault(name, []).append(lambda f=function, a=arguments: f(*a))  # type: ignore[misc]


def measure(pool: ThreadPoolExecutor, ways: dict[str, list[Callable[[], Any]]]) -> dict[str, list[float]]:
    """Billions of bytes per second of all threads together; the first round compiles, and does not count."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(ROUNDS + 1):
        for way, calls in ways.items():
            start = time.perf_counter()
            list(pool.map(_call, calls))
            if i > 0:
                samples[way].append(TOTAL * len(calls) / (time.perf_counter() - start) / 1e9)
    return samples


def _call(call: Callable[[], Any]) -> None:
    call()


if __name__ == "__main__":
    main()
