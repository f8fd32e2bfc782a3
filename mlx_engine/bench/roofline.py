"""Measure the machine's limits: memory bandwidth and peak arithmetic.

`Limits` samples both limits between the repetitions of a test, because the limits may change by half within minutes.
Its kernels (`kernels/cpu/roofline.py`) run on as many threads as the backend has. To measure the bandwidth, they read
the model's matrices; to measure the arithmetic, they run multiply-adds in registers. Without compiled kernels, NumPy
reads the model's matrices, and multiplies small matrices.

`read_bandwidth` (for the server) and `bandwidth_of` (for `inspect` and `plan`) read memory with NumPy. `product_rate`
(for `plan`) runs a matrix product of the backend. Each of these functions takes a fraction of a second, but
`product_rate` takes longer if the backend's kernels must first be compiled.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.cpu.descriptors import Matrix, address
from mlx_engine.backends.cpu.kernels import load_kernels
from mlx_engine.backends.numpy.simd import one_blas_thread
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.origin import cache_bytes
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.engine import Engine
from mlx_engine.loop.memory import linears
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    from mlx_engine.kernels.cpu.build.library import Library

# Minimum seconds of a sample, so that the start of threads does not matter.
SECONDS = 0.01


class InNumPy:
    """NumPy functions in place of the kernels of `kernels/cpu/roofline.py`, for machines without compiled kernels."""

    # The side of the square matrix of `compute`. The matrix and its product fit into a core's second-level cache.
    SIDE = 192

    def read_in_order(self, words: np.ndarray) -> int:
        """Read int64s in one stream; return their bitwise XOR."""
        return int(np.bitwise_xor.reduce(words))

    # NumPy cannot read several streams in one loop.
    read = read_in_order

    def compute(self, rounds: int) -> float:
        """Run `rounds` products of square matrices with BLAS, which approaches peak arithmetic; return an element."""
        a, product = np.ones((self.SIDE, self.SIDE), np.float32), np.empty((self.SIDE, self.SIDE), np.float32)
        for _ in range(rounds):
            np.matmul(a, a, out=product)
        return float(product[0, 0]) if rounds else 0.0

    def flops(self, rounds: int) -> int:
        """Return the number of additions and multiplications of `compute(rounds)`."""
        return 2 * rounds * self.SIDE**3


class Compiled:
    """The compiled kernels of `kernels/cpu/roofline.py`, with the methods of `InNumPy`."""

    def __init__(self, library: Library) -> None:
        library.need(["roofline"])
        self._library = library

    def read(self, words: np.ndarray) -> int:
        """Read int64s in eight streams; return their bitwise XOR."""
        return self._read(self._library.read_words, words)

    def read_in_order(self, words: np.ndarray) -> int:
        """Read int64s in one stream; return their bitwise XOR."""
        return self._read(self._library.read_words_in_order, words)

    def compute(self, rounds: int) -> float:
        """Run `rounds` multiply-adds in each of several registers; return a lane of the sum of the registers."""
        return float(self._ran(rounds)[2:3].view(np.float32)[0])

    def flops(self, rounds: int) -> int:
        """Return the number of additions and multiplications of `compute(rounds)`."""
        return rounds * int(self._ran(1)[:2].view(np.int64)[0])

    def _read(self, read: Callable[..., None], words: np.ndarray) -> int:
        out = np.empty(1, dtype=np.int64)
        read(address(words), words.size, address(out))
        return int(out[0])

    def _ran(self, rounds: int) -> np.ndarray:
        """Run the kernel `run_rounds`, and return its output as int32s (4,).

        The first two int32s have the bits of one int64: the number of additions and multiplications of all rounds. The
        third int32 has the bits of a float32, the result of `compute`. The fourth is unused.
        """
        out = np.empty(4, dtype=np.int32)
        self._library.run_rounds(rounds, address(out))
        return out


def kernels(*, jit: bool) -> Compiled | InNumPy:
    """Return the compiled kernels, or `InNumPy` if `jit` is false or there is no machine code."""
    library = load_kernels() if jit else None
    return InNumPy() if library is None else Compiled(library)


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
        """Read the bytes that `sample` reads, but in one stream per thread; take one sample of the bandwidth."""
        seconds = self._reading(self._repeats, self.kernels.read_in_order)
        self.in_order.append(self._nbytes * self._repeats / seconds)

    def take(self) -> dict[str, float]:
        """Return the medians of the samples since the last call, in GB/s and GFLOP/s, as fields of a row of results."""
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
    """Return a number of repetitions, a power of two, that take at least `SECONDS`."""
    n = 1
    while timed(n) < SECONDS:
        n *= 2
    return n


# Arrays of fewer than SMALL bytes in total are concatenated. Separate calls for many small arrays could take as long as
# reading them.
SMALL = 64 << 20


def layers_of(engine: Engine) -> list[Linear]:
    """Return all linear layers of a model, each once; q, k and v are separate layers."""
    found = linears(list(vars(engine.model).values()))
    return list({id(linear): linear for linear in found}.values())


def matrices(engine: Engine, checkpoint: Checkpoint) -> list[np.ndarray]:
    """Return the backend's matrices, each once, or the file's tensors if NumPy can view none of the matrices."""
    found: dict[int, np.ndarray] = {}
    for linear in layers_of(engine):
        weight = linear.weight
        memory = weight.data if isinstance(weight, Matrix) else weight
        if isinstance(memory, np.ndarray) and memory.flags.c_contiguous:
            found[memory.ctypes.data] = memory
    return list(found.values()) or [checkpoint.weight(name).data for name in checkpoint.shapes]


def in_words(array: np.ndarray) -> np.ndarray:
    """View the memory of an array as aligned int64s, without the bytes at both ends that fill no whole int64."""
    raw = array.reshape(-1).view(np.uint8)
    first = min(-raw.ctypes.data % 8, raw.size)
    words = raw[first : first + (raw.size - first) // 8 * 8].view(np.int64)
    words.flags.writeable = False
    return words


def side_by_side(words: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays; if they have fewer than `SMALL` bytes in total, return one concatenated copy."""
    return [in_words(np.concatenate(words))] if sum(w.nbytes for w in words) < SMALL else words


# `bandwidth_of` reads up to MOST_BYTES, READINGS times. At 10 GB/s, this takes 0.2 s.
MOST_BYTES = 512 << 20
READINGS = 4


def read_bandwidth(engine: Engine) -> float | None:
    """Return the bytes per second at which NumPy reads the model's weights: the largest of `READINGS` measurements.

    Read with as many threads as the backend has, and as many bytes as `bandwidth_of` reads.

    Return None if NumPy cannot view all weights, if more than half of their bytes fit into the processor's cache, or if
    the size of the cache is unknown. In these cases, the result might not be the memory bandwidth.
    """
    held = {id(linear.weight): linear.weight for linear in layers_of(engine)}
    words = [in_words(weight.data) for weight in held.values() if isinstance(weight, Matrix)]
    cache, nbytes = cache_bytes(), sum(array.nbytes for array in words)
    if len(words) < len(held) or cache is None or nbytes < 2 * cache:
        return None
    return bandwidth_of(words, getattr(engine.backend, "threads", 1))


def bandwidth_of(words: Sequence[np.ndarray], threads: int) -> float:
    """Return the bytes per second at which threads read int64 arrays: the largest of `READINGS` measurements.

    Read the first arrays, up to `MOST_BYTES` in total. If the first array alone is larger, read only this array.
    """
    ends = itertools.accumulate(array.nbytes for array in words)
    some = [array for array, end in zip(words, ends, strict=True) if end <= MOST_BYTES] or [words[0]]
    shares = [[np.array_split(array, threads)[i] for array in some] for i in range(threads)]

    def read_all(share: Sequence[np.ndarray]) -> None:
        for array in share:
            InNumPy().read(array)

    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READINGS):
            start = time.perf_counter()
            list(pool.map(read_all, shares))
            rates.append(sum(array.nbytes for array in some) / (time.perf_counter() - start))
    return max(rates)


# The default sizes of `product_rate`: a chunk of a prompt, and a matrix of a usual size.
PRODUCT_ROWS, PRODUCT_SIDE = 512, 2048
PRODUCTS = 5


def product_rate(backend: Backend, type_: GGMLType, rows: int = PRODUCT_ROWS, side: int = PRODUCT_SIDE) -> float:
    """Return the FLOP/s of the fastest of `PRODUCTS` products of (rows, side) with a (side, side) matrix of `type_`."""
    weight = Weight("speed", (side, side), type_, np.zeros(type_.bytes_for(side * side), np.uint8))
    rates = []
    with backend.session():
        linear = Linear("speed", backend.prepare(weight))
        x: Any = backend.as_activations(np.ones((rows, side), np.float32))
        for _ in range(PRODUCTS + 1):  # the first one warms up
            start = time.perf_counter()
            backend.wait(backend.linear(x, linear))
            rates.append(2.0 * rows * side * side / (time.perf_counter() - start))
    return max(rates[1:])
