"""Activations in float32 and in fixed point beside llama.cpp, on files that llama.cpp has quantised.

    python -m benchmarks.activations --python PATH        appends to benchmarks/results/activations.jsonl
    python -m benchmarks.activations --python PATH --files q4_k_m --rounds 3 --tests tg64 --out new.jsonl

With NUMBA_CPU_NAME=haswell and NUMBA_CPU_FEATURES=+avx2,+fma,+f16c our kernels have AVX2 code; rows record the name.

PATH is a Python that has llama-cpp-python. The files are those of `benchmarks.llama_quants`. All contestants of a file
and a test run once per round.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.llama_quants import AS_IS, MADE, MODEL, made
from benchmarks.log import FOLDER, Log
from benchmarks.peers.contests import (
    DEPTH,
    LLAMA,
    OURS,
    Contest,
    Contestant,
    contest_row,
    interpreters,
    play,
    report_line,
)
from benchmarks.sections import factor, fastest
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.limits import usable_cores

RESULTS = FOLDER / "activations.jsonl"
TESTS = {
    "pp512": Test(n_prompt=512), "tg64": Test(n_gen=64), "pp2048": Test(n_prompt=2048),
    "tg64@d4096": Test(n_gen=64, depth=DEPTH),
}  # fmt: skip
FILES = (AS_IS, "q4_0", "q4_k_m", "q6_k")
ROUNDS = 7


def main() -> None:
    """Quantise the files that are missing, then measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.activations", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    parser.add_argument("--files", nargs="+", choices=(AS_IS, *MADE), default=FILES)
    parser.add_argument("--tests", nargs="+", choices=tuple(TESTS), default=("pp512", "tg64"))
    options = parser.parse_args()
    log = Log("activations", options.out)
    paths = made(resolve(MODEL), options.python, [name for name in options.files if name != AS_IS])
    rounded = Contestant(OURS, {"backend": "parallel", "activations": "i16"})
    cores, compiled_for = usable_cores(), os.environ.get("NUMBA_CPU_NAME", "this processor")
    # Without this setting llama.cpp chooses whether it uses flash attention.
    peers = (Contestant(LLAMA, threads=cores), Contestant(LLAMA, {"flash_attention": False}, threads=cores))
    for name in options.files:
        for title in options.tests:
            exact = Contestant(OURS, {"backend": "parallel"})
            contest = Contest(TESTS[title], (exact, rounded, *peers), options.rounds)
            entries = play(contest, str(paths[name]), interpreters({LLAMA: options.python}))
            rows = []
            for entry in entries:
                print(f"{name}, {report_line(contest, entry)}")
                rows.append(log.append({"file": name, "processor": compiled_for, **contest_row(contest, entry)}))
            theirs = factor(rows[1], fastest(rows, LLAMA))
            print(f"{name}, {title}: i16 / f32 {factor(rows[1], rows[0])}, i16 / llama.cpp {theirs}", flush=True)


if __name__ == "__main__":
    main()
