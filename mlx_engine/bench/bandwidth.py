"""Measure the memory bandwidth in a fraction of a second, without a compiler: for a server that has just started."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlx_engine.backends.cpu.matrices import Matrix
from mlx_engine.bench.machine import cache_bytes
from mlx_engine.bench.model_memory import in_words
from mlx_engine.engine import Engine
from mlx_engine.kernels.cpu.roofline_numpy import read
from mlx_engine.schedule.traffic import linears

# The most bytes of a reading: at 10 GB/s all readings take 0.2 s.
MOST_BYTES = 512 << 20
READINGS = 4


def read_bandwidth(engine: Engine) -> float | None:
    """Return the bytes per second at which the backend's threads read the model's weights, the best of a few readings.

    Return None where this says nothing about the backend: its weights are not in the memory of the CPU, or half of them
    fit into the processor's cache.
    """
    held = {id(linear.weight): linear.weight for value in vars(engine.model).values() for linear in linears(value)}
    words = [in_words(weight.data) for weight in held.values() if isinstance(weight, Matrix)]
    cache, nbytes = cache_bytes(), sum(array.nbytes for array in words)
    if len(words) < len(held) or cache is None or nbytes < 2 * cache:
        return None
    return bandwidth_of(words, getattr(engine.backend, "threads", 1))


def bandwidth_of(words: Sequence[np.ndarray], threads: int) -> float:
    """Return the bytes per second of the best reading of int64 arrays by threads, at most `MOST_BYTES` of them."""
    ends = itertools.accumulate(array.nbytes for array in words)
    some = [array for array, end in zip(words, ends, strict=True) if end <= MOST_BYTES] or [words[0]]
    shares = [[np.array_split(array, threads)[i] for array in some] for i in range(threads)]

    def read_all(share: Sequence[np.ndarray]) -> None:
        for array in share:
            read(array)

    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READINGS):
            start = time.perf_counter()
            list(pool.map(read_all, shares))
            rates.append(sum(array.nbytes for array in some) / (time.perf_counter() - start))
    return max(rates)
