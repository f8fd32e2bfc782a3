"""Find the smallest width at which a quantised layer is not slower than float32: the measurement for AUTO_MIN_DIM.

    python -m benchmarks.crossover           appends to benchmarks/results/crossover.jsonl, every sample kept

One vector is multiplied with square matrices in F32 and in block formats, interleaved, on one thread and on all. Each
call takes another matrix, so that weights are read from memory as in a model. Only the narrowest matrices are read from
the cache, because all copies together fit into it. AUTO_MIN_DIM in `mlx_engine/weights/conversion.py` was chosen from
this table.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.log import FOLDER, Log, Row
from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.work import bytes_per_weight
from mlx_engine.quant.types import F32, Q4_0, Q4_1, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight

RESULTS = FOLDER / "crossover.jsonl"

WIDTHS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
TYPES = (F32, Q8_0, Q4_0, Q4_1)
BACKENDS = ("simd", "parallel")
# For each width, as many matrices are made as take TOTAL bytes in the smallest format, but at most MOST. TOTAL exceeds
# the size of a processor's last-level cache.
TOTAL, MOST = 64 * 2**20, 4000
ROUNDS = 15
# A product counts as slower only above this factor, because rounds differ by as much.
TOLERANCE = 1.02


def main() -> None:
    """Measure all widths."""
    log, rows = Log("crossover", RESULTS), []
    for name, width in itertools.product(BACKENDS, WIDTHS):
        # A new backend for each width: a backend keeps all matrices that it has multiplied with. Together, they take
        # most of a gigabyte.
        backend = create_backend(name)
        if not isinstance(backend, CompiledBackend):
            raise SystemExit("there are no compiled kernels here, so there is nothing to measure")
        types = [type_ for type_ in TYPES if type_ == F32 or bytes_per_weight(backend, type_) < 4]
        with backend.session():
            row = log.append({"backend": name, "threads": backend.threads, **measure(backend, width, types)})
        rows.append(row)
        print(name, width, {key: round(value, 2) for key, value in row["medians_us"].items()})
    print("from this width on Q8_0 is not slower:", crossover(rows))


def measure(backend: CompiledBackend, width: int, types: Sequence[GGMLType]) -> Row:
    """Return microseconds per product with a matrix of `width` rows and columns. The types are interleaved."""
    layers = {type_.name: matrices(backend, width, type_) for type_ in types}
    samples: dict[str, list[float]] = {name: [] for name in layers}
    x = np.ones((1, width), dtype=np.float32)
    for linears in layers.values():
        timed(backend, linears, x)
    for _ in range(ROUNDS):
        for name, linears in layers.items():
            samples[name].append(timed(backend, linears, x) / len(linears) * 1e6)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {"width": width, "medians_us": medians, "samples_us": samples}


def matrices(backend: CompiledBackend, width: int, type_: GGMLType) -> list[Linear]:
    """Return layers that are contiguous in memory, the same number for every type."""
    n = min(MOST, TOTAL // Q4_0.bytes_for(width * width))
    nbytes = type_.bytes_for(width * width)
    one = Weight.pack("w", np.full((width, width), 0.01, dtype=np.float32), type_).data
    memory = np.tile(one, n).reshape(n, nbytes)
    return [Linear("w", backend.prepare(Weight("w", (width, width), type_, memory[i]))) for i in range(n)]


def timed(backend: CompiledBackend, linears: Sequence[Linear], x: np.ndarray) -> float:
    """Return seconds of one product with each layer."""
    start = time.perf_counter()
    for linear in linears:
        backend.linear(x, linear)
    return time.perf_counter() - start


def crossover(rows: Sequence[Row], type_: str = Q8_0.name) -> int:
    """Return the least measured width from which on no backend is slower with `type_` than with F32."""
    slower = [row["width"] for row in rows if row["medians_us"][type_] > TOLERANCE * row["medians_us"][F32.name]]
    return min(int(row["width"]) for row in rows if row["width"] > max(slower, default=0))


if __name__ == "__main__":
    main()
