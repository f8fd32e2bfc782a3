"""`parallel` in plain NumPy: the products of `simd` in chunks over a thread pool.

BLAS runs on one thread in every chunk, and what a chunk is depends on shapes alone, so the bits of a result do not
depend on the number of threads. With compiled kernels `compiled.py` does the same, and wakes its threads for far less.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlx_engine.backends.parameters import Array, Linear
from mlx_engine.backends.simd import SimdBackend

# Multiplications below which work stays on one thread, and above which it is cut: handing out a chunk costs some 50
# microseconds, in which one core multiplies a few million numbers.
WORTHWHILE = 4_000_000
# Chunks that a product is cut into at most; more would even out more and cost more.
CHUNKS = 16


class ParallelBackend(SimdBackend):
    """NumPy on `threads` threads."""

    name = "parallel"

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="mlx_engine")

    def linear(self, x: Array, linear: Linear) -> Array:
        """Chunks of the weight's rows; each thread writes its own columns of the result."""
        w = linear.weight
        y = np.empty((len(x), len(w)), dtype=np.float32)

        def multiply(first: int, last: int) -> None:
            np.matmul(x, w[first:last].T, out=y[:, first:last])

        self._run(multiply, len(w), x.size * len(w))
        return y if linear.bias is None else y + linear.bias

    def _attend(self, q: Array, keys: Array, values: Array, window: int | None, scale: float) -> Array:
        """Chunks of the KV heads."""
        n_kv_heads, group = len(keys), q.shape[1] // len(keys)
        y = np.empty_like(q)

        def attend(first: int, last: int) -> None:
            heads, attend_to = slice(first * group, last * group), super(ParallelBackend, self)._attend
            y[:, heads] = attend_to(q[:, heads], keys[first:last], values[first:last], window, scale)

        self._run(attend, n_kv_heads, q.size * keys.shape[1])
        return y

    def _run(self, work: Callable[[int, int], None], n: int, multiplications: int) -> None:
        """Do `work(first, last)` for all of n, in chunks where there are enough multiplications."""
        n_chunks = min(n, CHUNKS, multiplications // WORTHWHILE)
        if n_chunks < 2:
            return work(0, n)
        edges = [n * i // n_chunks for i in range(n_chunks + 1)]
        # The list asks every chunk for its result, and so raises what one of them raised.
        list(self._executor.map(work, edges[:-1], edges[1:]))
        return None
