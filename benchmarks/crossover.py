"""From which width on a layer is multiplied faster quantised than not: the measurement behind AUTO_MIN_DIM.

    python -m benchmarks.crossover           appends to benchmarks/results/crossover.jsonl, every sample kept

One vector is multiplied with square matrices, as F32 and as block formats, by one thread and by all of them, in turns.
Each call takes another matrix, so that weights come from memory as they do in a model; of the narrowest there are
fewer bytes. `mlx_engine/models/conversion.py` has the constant that was read off the table.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.text import Row
from mlx_engine.backends import create_backend
from mlx_engine.backends.compiled import CompiledBackend
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.run import origin
from mlx_engine.bench.work import bytes_per_weight
from mlx_engine.quant.types import F32, Q4_0, Q4_1, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight

RESULTS = Path(__file__).parent / "results" / "crossover.jsonl"

WIDTHS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
TYPES = (F32, Q8_0, Q4_0, Q4_1)
BACKENDS = ("simd", "parallel")
# Of the smallest format: larger than a processor's last cache, while there are matrices enough to walk through.
TOTAL, MOST = 64 * 2**20, 4000
ROUNDS = 15
# A product that takes so much longer is no slower: rounds differ by more.
TOLERANCE = 1.02


def main() -> None:
    """Measure all widths."""
    common, rows = origin(), []
    for name, width in itertools.product(BACKENDS, WIDTHS):
        # A new one for each width: it keeps all that it has multiplied with, most of a gigabyte.
        backend = create_backend(name)
        if not isinstance(backend, CompiledBackend):
            raise SystemExit("there are no compiled kernels here, so there is nothing to measure")
        types = [type_ for type_ in TYPES if type_ == F32 or bytes_per_weight(backend, type_) < 4]
        with backend.session():
            row = {**common, "backend": name, "threads": backend.threads, **measure(backend, width, types)}
        rows.append(row)
        print(name, width, {key: round(value, 2) for key, value in row["medians_us"].items()})
    with RESULTS.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    print("from this width on Q8_0 is not slower:", crossover(rows))


def measure(backend: CompiledBackend, width: int, types: Sequence[GGMLType]) -> Row:
    """Microseconds per product of a vector with a matrix of `width` rows and columns, in rounds that take turns."""
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
    """Layers that lie side by side in memory, as many for every type."""
    n = min(MOST, TOTAL // Q4_0.bytes_for(width * width))
    nbytes = type_.bytes_for(width * width)
    one = Weight.pack("w", np.full((width, width), 0.01, dtype=np.float32), type_).data
    memory = np.tile(one, n).reshape(n, nbytes)
    return [Linear("w", backend.prepare(Weight("w", (width, width), type_, memory[i]))) for i in range(n)]


def timed(backend: CompiledBackend, linears: Sequence[Linear], x: np.ndarray) -> float:
    """Seconds for one product with each."""
    start = time.perf_counter()
    for linear in linears:
        backend.linear(x, linear)
    return time.perf_counter() - start


def crossover(rows: Sequence[Row], type_: str = Q8_0.name) -> int:
    """The smallest width from which on no backend is slower with that type than with F32."""
    slower = [row["width"] for row in rows if row["medians_us"][type_] > TOLERANCE * row["medians_us"][F32.name]]
    return min(int(row["width"]) for row in rows if row["width"] > max(slower, default=0))


if __name__ == "__main__":
    main()
