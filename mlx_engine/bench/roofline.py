"""Measure the machine's limits between the runs of a cell, because they change by half within minutes.

Memory bandwidth is measured by reading the model's matrices on as many threads as the backend has; peak arithmetic with
operands in registers. See `kernels/cpu/roofline.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np

from mlx_engine.backends.numpy.blas import one_blas_thread
from mlx_engine.bench.model_memory import in_words, side_by_side

# Minimum seconds of a sample, so that the start of threads does not matter.
SECONDS = 0.01


def kernels(*, jit: bool) -> ModuleType:
    """Return the compiled kernels, or their NumPy versions without `jit` or a compiler."""
    if jit:
        try:
            from mlx_engine.kernels.cpu import roofline
            from mlx_engine.kernels.cpu.build import library

            if library.lacking() is None:
                return roofline
        except ImportError:
            pass
    from mlx_engine.kernels.cpu import roofline_numpy

    return roofline_numpy


class Limits:
    """Sampler of memory bandwidth and peak arithmetic, called between measurements."""

    def __init__(self, arrays: Sequence[np.ndarray], threads: int, *, jit: bool = True) -> None:
        self.threads, self.kernels = threads, kernels(jit=jit)
        words = side_by_side([in_words(array) for array in arrays])
        self._parts = [[np.array_split(w, threads)[i] for w in words] for i in range(threads)]
        self._nbytes = sum(w.nbytes for w in words)
        self._pool = ThreadPoolExecutor(threads)
        self.read: list[float] = []
        self.in_order: list[float] = []
        self.peak: list[float] = []
        # Warm up: compile, start the threads, and load the file's pages into memory.
        self._reading(1), self._computing(1)
        self._repeats, self._rounds = enough(self._reading), enough(self._computing)

    def sample(self) -> None:
        """Take one sample of memory bandwidth and one of peak arithmetic."""
        self.read.append(self._nbytes * self._repeats / self._reading(self._repeats))
        flops = self.kernels.flops(self._rounds) * self.threads
        self.peak.append(flops / self._computing(self._rounds))

    def sample_in_order(self) -> None:
        """Take one sample of the bandwidth of reading the same bytes sequentially."""
        seconds = self._reading(self._repeats, self.kernels.read_in_order)
        self.in_order.append(self._nbytes * self._repeats / seconds)

    def take(self) -> dict[str, float]:
        """Return the medians since the last call as fields of a row, in GB/s and GFLOP/s."""
        found = {"read_gbs": statistics.median(self.read) / 1e9, "peak_gflops": statistics.median(self.peak) / 1e9}
        self.read, self.peak = [], []
        return found

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _reading(self, repeats: int, read: Callable[[np.ndarray], int] | None = None) -> float:
        read = read or self.kernels.read

        def part(words: Iterable[np.ndarray]) -> None:
            for _ in range(repeats):
                for some in words:
                    read(some)

        return self._timed(part, self._parts)

    def _computing(self, rounds: int) -> float:
        with one_blas_thread():
            return self._timed(self.kernels.compute, [rounds] * self.threads)

    def _timed(self, work: Callable[[Any], Any], parts: Sequence[Any]) -> float:
        start = time.perf_counter()
        if len(parts) == 1:
            work(parts[0])
        else:
            list(self._pool.map(work, parts))
        return time.perf_counter() - start


def enough(timed: Callable[[int], float]) -> int:
    """Return how many repetitions take at least `SECONDS`."""
    n = 1
    while timed(n) < SECONDS:
        n *= 2
    return n
