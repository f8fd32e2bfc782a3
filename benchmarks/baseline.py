"""The baseline: `scalar` and `simd` in NumPy, with a KV cache and without.

    python -m benchmarks.baseline            appends to benchmarks/results/baseline.jsonl, every sample kept

Run it on an idle machine. Each cell has a time budget; a test that does not fit is extrapolated from the passes that
did, and marked. `scalar` does not run the 0.6B shape: its weights as Python floats take 19 GB, and a token a minute.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.log import Log
from mlx_engine.bench.run import rows
from mlx_engine.bench.samples import Test

RESULTS = Path(__file__).parent / "results" / "baseline.jsonl"

# Model, backends, tests, repetitions, seconds per cell.
PLAN = (
    ("builtin", ("scalar", "simd"), (Test(n_prompt=64), Test(n_gen=64), Test(n_gen=256)), 5, 60.0),
    ("shape:qwen3-0.6b", ("simd",), (Test(n_prompt=128), Test(n_prompt=512), Test(n_gen=16)), 3, 120.0),
)


def main() -> None:
    """Measure all cells."""
    log = Log("baseline", RESULTS)
    for model, backends, tests, repetitions, budget in PLAN:
        for row in rows(model, backends, tests, kv=(False, True), repetitions=repetitions, budget=budget, jit=False):
            log.append(row)
            print(row["model_name"], row["backend"], "cache" if row["kv"] else "no cache", row["test"],
                  f"{row['median_ts']:.4g} tokens/s", row["estimated"] or "")  # fmt: skip


if __name__ == "__main__":
    main()
