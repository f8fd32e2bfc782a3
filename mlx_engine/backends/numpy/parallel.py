"""`parallel` in plain NumPy: the products of `simd` in chunks on a thread pool.

BLAS runs on one thread in every chunk, and chunks depend on shapes only, so results are bit-identical for any number of
threads. `cpu/backend.py` does the same with compiled kernels, and the latency of its thread pool is much lower.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.parameters import Linear, Native, Scores

# Multiplications per chunk, at least. Submitting a chunk costs about 50 microseconds, in which one core does a few
# million multiplications.
WORTHWHILE = 4_000_000
# The largest number of chunks per product. More chunks would balance the threads better and cost more to submit.
CHUNKS = 16


class ParallelBackend(SimdBackend):
    """NumPy on `threads` threads."""

    name = "parallel"

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self._start()

    def _start(self) -> None:
        self._executor, self._process = ThreadPoolExecutor(self.threads, thread_name_prefix="mlx_engine"), os.getpid()

    def linear(self, x: Native, linear: Linear) -> Native:
        """Each chunk multiplies some rows of the weight and writes the same columns of the result."""
        w = linear.weight
        y = np.empty((len(x), len(w)), dtype=np.float32)

        def multiply(first: int, last: int) -> None:
            np.matmul(x, w[first:last].T, out=y[:, first:last])

        self._run(multiply, len(w), x.size * len(w))
        return y if linear.bias is None else y + linear.bias

    def _attend(self, q: Native, keys: Native, values: Native, window: int | None, of: Scores) -> Native:
        """Each chunk computes some KV heads."""
        n_kv_heads, group = len(keys), q.shape[1] // len(keys)
        y = np.empty_like(q)

        def attend(first: int, last: int) -> None:
            heads, attend_to = slice(first * group, last * group), super(ParallelBackend, self)._attend
            own = of if of.sinks is None else replace(of, sinks=of.sinks[heads])
            y[:, heads] = attend_to(q[:, heads], keys[first:last], values[first:last], window, own)

        self._run(attend, n_kv_heads, q.size * keys.shape[1])
        return y

    def _run(self, work: Callable[[int, int], None], n: int, multiplications: int) -> None:
        """Call `work(first, last)` for all of [0, n), in chunks if there are enough multiplications."""
        n_chunks = min(n, CHUNKS, multiplications // WORTHWHILE)
        if n_chunks < 2:
            return work(0, n)
        if self._process != os.getpid():  # a forked process has none of its parent's threads
            self._start()
        edges = [n * i // n_chunks for i in range(n_chunks + 1)]
        # `list` waits for every chunk, and raises the exception of a chunk that failed.
        list(self._executor.map(work, edges[:-1], edges[1:]))
        return None
