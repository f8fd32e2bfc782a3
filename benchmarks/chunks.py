"""Find the smallest matrix whose gemv is faster on several threads than on one: the measurement for CHUNK_BYTES.

    python -m benchmarks.chunks              appends to benchmarks/results/chunks.jsonl, every sample kept

One vector is multiplied with a Q8_0 matrix of 1,024 columns, by one thread and by all threads, interleaved. Each call
takes another matrix, so that weights are read from memory as in a model. CHUNK_BYTES in `kernels/cpu/build/layout.py`
was chosen from this table.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.log import FOLDER, Log, Row
from kernels import blocks
from kernels.cpu.build import layout
from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.descriptors import Block, address
from mlx_engine.backends.parameters import Linear
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

RESULTS = FOLDER / "chunks.jsonl"

N_COLUMNS = 1024
ROW_BYTES = N_COLUMNS // 32 * blocks.Q8_0.itemsize
SIZES = [2**n * 1024 for n in range(3, 13)]
# The total bytes of all matrices, more than a processor's last-level cache has. Of matrices below 50 KB only 2,000 are
# made, which have fewer bytes together.
TOTAL = 96 * 2**20
ROUNDS = 15


def main() -> None:
    """Measure all sizes."""
    log = Log("chunks", RESULTS)
    backend = create_backend("parallel")
    if not isinstance(backend, CompiledBackend):
        raise SystemExit("there are no compiled kernels here, so there is nothing to measure")
    weights = np.zeros(TOTAL // blocks.Q8_0.itemsize, dtype=blocks.Q8_0)
    weights["d"], weights["qs"] = 0.01, 1
    common = {"threads": backend.threads, "chunk_bytes": layout.CHUNK_BYTES}
    with backend.session():
        for size in SIZES:
            row = log.append({**common, **measure(backend, weights.view(np.uint8), max(1, size // ROW_BYTES))})
            print(row["bytes"], f"{row['alone_us']:.2f} us alone, {row['handed_out_us']:.2f} us handed out")


def measure(backend: CompiledBackend, weights: np.ndarray, n_rows: int) -> Row:
    """Return microseconds per product with a matrix of `n_rows` rows: the interleaved samples and their medians.

    `alone` is the product on one thread, `handed_out` on all threads.
    """
    nbytes = n_rows * ROW_BYTES
    blocks_ = {}
    for way, hand_out in (("alone", 0), ("handed_out", 1)):
        made = [block(backend, weights[at : at + nbytes], n_rows) for at in range(0, TOTAL - nbytes, nbytes)][:2000]
        for one in made:
            one.descriptor[layout.HAND_OUT] = hand_out
        blocks_[way] = made
    samples: dict[str, list[float]] = {way: [] for way in blocks_}
    for _ in range(ROUNDS):
        for way, made in blocks_.items():
            samples[way].append(timed(backend, made) / len(made) * 1e6)
    medians = {f"{way}_us": statistics.median(times) for way, times in samples.items()}
    return {"bytes": nbytes, **medians, "samples_us": samples}


def block(backend: CompiledBackend, weights: np.ndarray, n_rows: int) -> Block:
    """Return one matrix as a job, cut into chunks of at most half its rows, so that two threads can share the job."""
    layer = Linear("w", backend.prepare(Weight("w", (n_rows, N_COLUMNS), Q8_0, weights)))
    made = Block([layer], None, 0, backend.library)
    made.descriptor[layout.CHUNK_GEMV] = min(made.descriptor[layout.CHUNK_GEMV], max(1, n_rows // 2))
    return made


def timed(backend: CompiledBackend, blocks_: list[Block]) -> float:
    """Return seconds of one product with each block."""
    x = np.ones((1, N_COLUMNS), dtype=np.float32)
    y = np.empty((1, blocks_[0].n_outputs), dtype=np.float32)
    where = address(x), 0, 0, address(y)
    backend.pool.shared.wake()
    start = time.perf_counter()
    for one in blocks_:
        backend.library.project(backend.pool.address, one.address, 1, *where)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
