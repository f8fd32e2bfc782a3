"""The ladder: every backend, in float32 and as stored, with what moved prefill and decode most.

    python -m benchmarks.sweep [MODEL]       appends to benchmarks/results/sweep.jsonl, every sample kept

Rows are those of `python cli.py bench --sweep`, with its default tests. Run it on an idle machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.log import Log
from mlx_engine.bench.ladder import text
from mlx_engine.bench.sweep import Plan, sweep

RESULTS = Path(__file__).parent / "results" / "sweep.jsonl"
# Seconds per cell; a cell that does not fit is extrapolated.
BUDGET = 60.0


def main(model: str = "shape:qwen3-0.6b") -> None:
    """Measure all rungs, then print the tables."""
    log = Log("sweep", RESULTS)
    print(text([log.append(row) for row in sweep(model, Plan(budget=BUDGET))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
