"""Measure decode after long texts, with each type of keys and values, compared with llama.cpp, which uses float16.

    python -m benchmarks.kv_types --python PATH        appends to benchmarks/results/kv_types.jsonl
    python -m benchmarks.kv_types --python PATH --depths 4096 --rounds 3 --out new.jsonl
    python -m benchmarks.kv_types --no-peers --depths 16384

PATH is a Python interpreter that has llama-cpp-python. Our keys and values are made-up numbers, which does not change
the time of decode. llama.cpp must compute its own: for 16,384 tokens, this takes several minutes before its first run.
`--no-peers` leaves llama.cpp out. Each type runs once per round, and so does llama.cpp with and without flash
attention; after two rounds, only the faster of these settings continues.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.llama_quants import MODEL
from benchmarks.log import FOLDER, Log
from benchmarks.peers.contests import LLAMA, OURS, Contest, Contestant, contest_row, interpreters, play, report_line
from benchmarks.sections import factor
from mlx_engine.backends import KV_TYPES
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "kv_types.jsonl"


def main() -> None:
    """Measure each depth."""
    parser = argparse.ArgumentParser(prog="benchmarks.kv_types", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depths", type=int, nargs="+", default=(4096, 16384))
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    log, path, cores = Log("kv_types", options.out), str(resolve(MODEL)), usable_cores()
    ours = tuple(Contestant(OURS, {"backend": "parallel", "kv_type": type_}) for type_ in KV_TYPES)
    peers = tuple(Contestant(LLAMA, {"flash_attention": uses}, threads=cores) for uses in (True, False))
    compiled_for = os.environ.get("NUMBA_CPU_NAME", "this processor")
    for depth in options.depths:
        contest = Contest(Test(n_gen=64, depth=depth), ours if options.no_peers else (*ours, *peers), options.rounds)
        rows = []
        for entry in play(contest, path, interpreters({LLAMA: options.python})):
            print(report_line(contest, entry))
            rows.append(log.append({"processor": compiled_for, **contest_row(contest, entry)}))
        for type_, row in zip(KV_TYPES[1:], rows[1:], strict=False):
            print(f"{contest.title}: {type_} / f32 {factor(row, rows[0])}", flush=True)


if __name__ == "__main__":
    main()
