"""Measure the speed with float32 and fixed-point (i16) activations, and llama.cpp's, on files quantised by llama.cpp.

    python -m benchmarks.activations --python PATH        appends to benchmarks/results/activations.jsonl
    python -m benchmarks.activations --python PATH --files q4_k_m --rounds 3 --tests tg64 b8 --out new.jsonl

To measure AVX2 code on an AVX-512 processor, set NUMBA_CPU_NAME=haswell and NUMBA_CPU_FEATURES=+avx2,+fma,+f16c, and
use a llama.cpp that is built for AVX2; for AVX-VNNI, NUMBA_CPU_NAME=alderlake and the feature +avxvnni in addition.
Rows record NUMBA_CPU_NAME, and the instructions that llama.cpp reports.

PATH is a Python interpreter that has llama-cpp-python. `--openvino PATH` names an interpreter that has
`optimum-intel[openvino]` and transformers; OpenVINO is then measured, too, on Q8_0 and Q4_0, in tests without depth and
with a single sequence.

The files are those of `benchmarks.llama_quants`, and `affine4`, a folder in MLX's 4-bit format, which llama.cpp does
not read. For each file and test, every contestant runs once per round; in tests of a single sequence, llama.cpp
continues after two rounds only with its fastest setting. Rows are written after each test, so a run that ends early can
be continued with the tests that are missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.concurrency import DEPTH as PROMPT
from benchmarks.concurrency import SPARE, STEPS
from benchmarks.llama_quants import AS_IS, MADE, MODEL, made
from benchmarks.log import FOLDER, Log, Row
from benchmarks.peers.contests import (
    DEPTH,
    LLAMA,
    OPENVINO,
    OURS,
    Contest,
    Contestant,
    Entry,
    contest_row,
    interpreters,
    opened,
    play,
    report_line,
)
from benchmarks.peers.process import PeerError, Process
from benchmarks.sections import factor, fastest
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "activations.jsonl"
TESTS = {
    "pp512": Test(n_prompt=512), "tg64": Test(n_gen=64), "pp2048": Test(n_prompt=2048),
    "tg64@d4096": Test(n_gen=64, depth=DEPTH),
}  # fmt: skip
# Decode of several sequences, each after a prompt of its own (`benchmarks.concurrency`).
BATCHES = {"b8": 8, "b32": 32}
AFFINE = "affine4"
FILES = (AS_IS, "q4_0", "q4_k_m", "q6_k", AFFINE)
# The files on which OpenVINO is measured, and the bits of OpenVINO's own weights, about as many as in the file.
OPENVINO_BITS = {AS_IS: 8, "q4_0": 4}
ROUNDS = 7


def main() -> None:
    """Quantise the files that are missing, then measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.activations", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--openvino", help="an interpreter that has OpenVINO; without it OpenVINO is left out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    parser.add_argument("--files", nargs="+", choices=(AS_IS, *MADE, AFFINE), default=FILES)
    parser.add_argument("--tests", nargs="+", choices=(*TESTS, *BATCHES), default=("pp512", "tg64"))
    options = parser.parse_args()
    log = Log("activations", options.out)
    paths = made(resolve(MODEL), options.python, [name for name in options.files if name in MADE])
    if AFFINE in options.files:
        paths[AFFINE] = affine_of(paths[AS_IS])
    compiled_for = os.environ.get("NUMBA_CPU_NAME", "this processor")
    for name in options.files:
        for title in options.tests:
            of = contestants(has_peer=name != AFFINE)
            pythons = interpreters({LLAMA: options.python, OPENVINO: options.openvino or sys.executable})
            if options.openvino and name in OPENVINO_BITS and title in TESTS and not TESTS[title].depth:
                of = (*of, Contestant(OPENVINO, {"bits": OPENVINO_BITS[name]}, stays=True))
            if title in BATCHES:
                contest, entries = batches(BATCHES[title], of, str(paths[name]), pythons, options.rounds)
            else:
                contest = Contest(TESTS[title], of, options.rounds)
                entries = play(contest, str(paths[name]), pythons)
            rows: list[Row] = []
            for entry in entries:
                print(f"{name}, {report_line(contest, entry)}")
                rows.append(log.append({"file": name, "processor": compiled_for, **contest_row(contest, entry)}))
            theirs = factor(rows[1], fastest(rows, LLAMA))
            print(f"{name}, {title}: i16 / f32 {factor(rows[1], rows[0])}, i16 / llama.cpp {theirs}", flush=True)


def contestants(*, has_peer: bool) -> tuple[Contestant, ...]:
    """Return float32, then fixed point, then settings of llama.cpp if it reads the file."""
    cores = usable_cores()
    ours = (
        Contestant(OURS, {"backend": "parallel"}),
        Contestant(OURS, {"backend": "parallel", "activations": "i16"}),
    )
    # Without this setting llama.cpp chooses whether it uses flash attention.
    peers = (Contestant(LLAMA, threads=cores), Contestant(LLAMA, {"flash_attention": False}, threads=cores))
    return (*ours, *peers) if has_peer else ours


def affine_of(source: Path) -> Path:
    """Return the folder in MLX's 4-bit format; if it is missing, make it from the source."""
    folder = source.with_name(f"{source.stem.removesuffix('-q8_0')}-{AFFINE}")
    if not folder.exists():
        part = folder.with_suffix(".part")
        command = [sys.executable, "-m", "mlx_engine", "quantize", str(source), str(part), "--to", "mlx-4bit"]
        done = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{AFFINE}: {' '.join(command)} failed: {done.stderr.strip()}")
        part.rename(folder)
    return folder


def batches(
    n: int, of: Sequence[Contestant], model: str, pythons: dict[str, str], rounds: int
) -> tuple[Contest, list[Entry]]:
    """Run steps of n sequences, the contestants interleaved; return the contest, and entries with times by round."""
    contest = Contest(Test(n_gen=n * STEPS), tuple(of), rounds, about=f"{n} sequences")
    entries = [Entry(contestant) for contestant in of]
    common = {"model": model, "n_sequences": n, "depth": PROMPT, "spare": SPARE}
    with ExitStack() as stack:
        running: list[tuple[Entry, Process]] = []
        for entry in entries:
            who = entry.contestant
            threads = {"threads": who.threads} if who.threads else {}
            try:
                process = stack.enter_context(opened(who, pythons, **common, **threads))
            except PeerError as error:
                entry.absent = str(error)
                continue
            running.append((entry, process))
            entry.facts = process.facts
        for number in range(rounds):
            for entry, process in running if number % 2 == 0 else reversed(running):
                seconds = process.ask("decode", n_sequences=n, n_steps=STEPS)["seconds"]
                entry.seconds.append(sum(seconds))
                entry.passes.append(seconds)
    return contest, entries


if __name__ == "__main__":
    main()
