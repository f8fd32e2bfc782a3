"""Measure passes of 1 to 512 tokens with logits for each, in tokens/s: the cost of batches and of speculation.

    python -m benchmarks.rows [MODEL]        appends to benchmarks/results/rows.jsonl, every sample kept

A row is a token of a pass. The passes run on the compiled CPU backend, interleaved, each after the same 64 tokens. The
limit of n rows is the smaller of n times one row's rate (the limit by memory) and the rate of 512 rows (by arithmetic).
"""

from __future__ import annotations

import statistics
import sys
import time

import mlx_engine
from benchmarks.log import FOLDER, Log, Row
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.loop.forward import forward

RESULTS = FOLDER / "rows.jsonl"

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 64, 512)
# Tokens in the cache before each pass.
DEPTH = 64
ROUNDS = 9


def main(source: str = "shape:qwen3-0.6b") -> None:
    """Measure all numbers of rows."""
    log = Log("rows", RESULTS)
    engine = mlx_engine.load(source, "parallel", speculate="off")
    if not isinstance(engine.backend, CompiledBackend):
        raise SystemExit("there are no compiled kernels here, so there is nothing to measure")
    row = {"model_name": engine.path.stem, "threads": engine.backend.threads, **measure(engine)}
    for n, rate in row["medians_ts"].items():
        print(f"{n:>4} rows: {rate:7.1f} tokens/s, {rate / limit(row['medians_ts'], int(n)):.2f} of the limit")
    log.append(row)


def measure(engine: mlx_engine.Engine) -> Row:
    """Return every sample, and the medians, in tokens per second by rows of a pass."""
    model, ids = engine.model, [(7 * i + 3) % engine.config.vocab_size for i in range(DEPTH + max(ROWS))]
    samples: dict[str, list[float]] = {str(n): [] for n in ROWS}
    with engine.backend.session():
        kv = model.new_kv(DEPTH + max(ROWS))
        forward(model, SequenceInput(ids[:DEPTH], kv, wanted=0))
        for counted in range(-1, ROUNDS):
            for n in ROWS:
                start = time.perf_counter()
                batch = begin([SequenceInput(ids[DEPTH : DEPTH + n], kv, wanted=None)])
                model.forward(batch)
                seconds = time.perf_counter() - start
                batch.roll_back()
                if counted >= 0:  # skip the first round, in which weights and pages are not in memory yet
                    samples[str(n)].append(n / seconds)
    return {"samples_ts": samples, "medians_ts": {n: statistics.median(rates) for n, rates in samples.items()}}


def limit(medians: dict[str, float], n: int) -> float:
    """Return the smaller of n times one row's rate and the rate of the longest pass."""
    return min(n * medians["1"], medians[str(max(map(int, medians)))])


if __name__ == "__main__":
    main(*sys.argv[1:])
