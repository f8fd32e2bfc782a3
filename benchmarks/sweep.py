"""Measure the ladder, the list of all backends from slow to fast, with weights in float32 and in the file's types.

    python -m benchmarks.sweep [MODEL]       appends to benchmarks/results/sweep.jsonl, every sample kept
    python -m benchmarks.sweep --baseline    appends to benchmarks/results/baseline.jsonl

Rows are those of `python cli.py bench --sweep`, with its default tests. The baseline is `scalar` and `simd` in NumPy,
with a KV cache and without; `scalar` does not run the 0.6B shape, whose weights as Python floats take 19 GB. Each cell
has a time budget; a test that does not fit is extrapolated from the passes that ran, and marked. Run it on an idle
machine.
"""

from __future__ import annotations

import sys

from benchmarks.log import FOLDER, Log
from mlx_engine.bench.ladder import text
from mlx_engine.bench.run import rows
from mlx_engine.bench.samples import Test
from mlx_engine.bench.sweep import Plan, sweep

RESULTS = FOLDER / "sweep.jsonl"
# Seconds per cell; a cell that does not fit is extrapolated.
BUDGET = 60.0

BASELINE_RESULTS = FOLDER / "baseline.jsonl"

# Model, backends, tests, repetitions, seconds per cell.
BASELINE = (
    ("builtin", ("scalar", "simd"), (Test(n_prompt=64), Test(n_gen=64), Test(n_gen=256)), 5, 60.0),
    ("shape:qwen3-0.6b", ("simd",), (Test(n_prompt=128), Test(n_prompt=512), Test(n_gen=16)), 3, 120.0),
)


def main(model: str = "shape:qwen3-0.6b") -> None:
    """Measure all rungs, then print the tables."""
    log = Log("sweep", RESULTS)
    print(text([log.append(row) for row in sweep(model, Plan(budget=BUDGET))]))


def baseline() -> None:
    """Measure all cells of the baseline."""
    log = Log("baseline", BASELINE_RESULTS)
    for model, backends, tests, repetitions, budget in BASELINE:
        for row in rows(model, backends, tests, kv=(False, True), repetitions=repetitions, budget=budget, jit=False):
            log.append(row)
            print(row["model_name"], row["backend"], "cache" if row["kv"] else "no cache", row["test"],
                  f"{row['median_ts']:.4g} tokens/s", row["estimated"] or "")  # fmt: skip


if __name__ == "__main__":
    baseline() if sys.argv[1:] == ["--baseline"] else main(*sys.argv[1:])
