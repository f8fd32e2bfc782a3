"""Compare reading memory in several interleaved streams with reading one stream: the measurement for MAX_WAYS.

    python -m benchmarks.ways                appends to benchmarks/results/ways.jsonl, every sample kept

A plain read, and gemv with a matrix in Q8_0 and in float32, are measured on all threads. Each thread has its own
matrix, larger than the processor's cache. The two ways are measured alternately, round by round. MAX_WAYS, the most
streams of a gemv, is in `kernels/cpu/build/layout.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.log import FOLDER, Log
from kernels import blocks
from kernels.cpu import roofline
from kernels.cpu.build.jit import jit
from kernels.cpu.build.layout import LANES, LINE_BYTES, MAX_WAYS
from kernels.cpu.build.memory import raw
from kernels.cpu.build.vectors import add as add_vectors
from kernels.cpu.build.vectors import fma, load, total, zeros
from kernels.cpu.formats import float32, q8_0
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "ways.jsonl"

N_COLUMNS = 1024
# Bytes of each thread's matrix.
TOTAL = 96 * 2**20
ROUNDS = 25
IN_ORDER, INTERLEAVED = "in_order", "in_turns"


@jit
def quants_in_order(weights: int, x: Any, y: Any, n_rows: int) -> None:
    """Multiply a vector with a Q8_0 matrix at an address, row by row, in two independent sums."""
    at = 0
    for r in range(n_rows):
        even, odd = zeros(), zeros()
        for column in range(0, N_COLUMNS, 2 * q8_0.BLOCK):
            a, b = q8_0.weights(raw(weights), at)
            even = fma(b, load(x, column + LANES), fma(a, load(x, column), even))
            at += q8_0.BLOCK_BYTES
            a, b = q8_0.weights(raw(weights), at)
            odd = fma(b, load(x, column + 3 * LANES), fma(a, load(x, column + 2 * LANES), odd))
            at += q8_0.BLOCK_BYTES
        y[r] = total(add_vectors(even, odd))


@jit
def floats_in_order(weights: Any, x: Any, y: Any, n_rows: int) -> None:
    """Multiply a vector with a float32 matrix, row by row."""
    for r in range(n_rows):
        y[r] = float32.dot(weights, r * N_COLUMNS, x, 0, N_COLUMNS)


@jit
def quants_interleaved(weights: int, x: Any, y: Any, n_rows: int) -> None:
    """Multiply a vector with a Q8_0 matrix, four distant rows at a time."""
    apart, size = n_rows // MAX_WAYS, N_COLUMNS // q8_0.BLOCK * q8_0.BLOCK_BYTES
    y[:n_rows] = 0
    rows = (weights, weights + apart * size, weights + 2 * apart * size, weights + 3 * apart * size)
    last = weights + (n_rows - 1) * size
    q8_0.four_rows(
        1, rows, (last, last, last, last), size, apart, N_COLUMNS, x, 0, y, 0, apart, n_rows, 16 * LINE_BYTES, 0
    )


@jit
def floats_interleaved(weights: int, x: Any, y: Any, n_rows: int) -> None:
    """Multiply a vector with a float32 matrix, four distant rows at a time."""
    apart, size = n_rows // MAX_WAYS, 4 * N_COLUMNS
    y[:n_rows] = 0
    rows = (weights, weights + apart * size, weights + 2 * apart * size, weights + 3 * apart * size)
    last = weights + (n_rows - 1) * size
    float32.four_rows(
        1, rows, (last, last, last, last), size, apart, N_COLUMNS, x, 0, y, 0, apart, n_rows, 16 * LINE_BYTES, 0
    )


def main() -> None:
    """Measure the plain read and both products."""
    log, threads = Log("ways", RESULTS), usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        for what, ways in kinds(threads).items():
            samples = measure(pool, ways)
            log.append({"threads": threads, "nbytes": TOTAL * threads, "what": what, "samples_gbs": samples})
            print(what, {way: f"{statistics.median(rates):.1f} GB/s" for way, rates in samples.items()})


def kinds(threads: int) -> dict[str, dict[str, list[Callable[[], Any]]]]:
    """Return calls by measurement and way of reading, one call per thread."""
    x = np.ones(N_COLUMNS, dtype=np.float32)
    made: dict[str, dict[str, list[Callable[[], Any]]]] = {}
    for _ in range(threads):
        stored = np.zeros(TOTAL // blocks.Q8_0.itemsize, dtype=blocks.Q8_0)
        stored["d"], stored["qs"] = 0.01, 1
        dense = np.ones(TOTAL // 4, dtype=np.float32)
        n_stored, n_dense = len(stored) * 32 // N_COLUMNS // MAX_WAYS * MAX_WAYS, len(dense) // N_COLUMNS
        y = np.empty(max(n_stored, n_dense), dtype=np.float32)
        words = dense.view(np.int64)
        add(made, "plain read", stored, (roofline.read_in_order, words), (roofline.read, words))
        of_stored, of_dense = (stored.ctypes.data, x, y, n_stored), (dense.ctypes.data, x, y, n_dense)
        add(made, "Q8_0 product", stored, (quants_in_order, *of_stored), (quants_interleaved, *of_stored))
        add(made, "float32 product", dense, (floats_in_order, dense, x, y, n_dense), (floats_interleaved, *of_dense))
    return made


def add(
    made: dict[str, dict[str, list[Callable[[], Any]]]], what: str, held: np.ndarray, *ways: tuple[Any, ...]
) -> None:
    """Add one thread's calls. Some have only the address of the array `held`, so all calls keep a reference to it."""

    def call(function: Callable[..., Any], arguments: list[Any], held: np.ndarray = held) -> Callable[[], Any]:
        return lambda: (function(*arguments), held)[0]

    for name, (function, *arguments) in zip((IN_ORDER, INTERLEAVED), ways, strict=True):
        made.setdefault(what, {}).setdefault(name, []).append(call(function, arguments))


def measure(pool: ThreadPoolExecutor, ways: dict[str, list[Callable[[], Any]]]) -> dict[str, list[float]]:
    """Return GB/s of all threads together. The first round compiles and does not count."""
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
