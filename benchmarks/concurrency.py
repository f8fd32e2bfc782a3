"""Measure decode of 1 to 32 sequences in tokens per second, compared with llama.cpp and with the machine's limits.

    python -m benchmarks.concurrency --python llama.cpp=PATH    appends to benchmarks/results/concurrency.jsonl

Each sequence has its own prompt. Our scheduler, and llama.cpp with each of several settings, run in processes of their
own, with the same file and the same number of threads. Every round runs every engine with every number of sequences, in
an order that is reversed in every other round. There are two limits, measured in every round: the rate if a step took
only the time to read all weights, keys and values once at the memory bandwidth, and the rate if it took only the time
of all arithmetic at the peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.batch import limit
from benchmarks.log import FOLDER, Log, Row
from benchmarks.peers.contests import LLAMA, OURS, interpreters
from benchmarks.peers.process import PeerError, Process
from mlx_engine.bench.origin import describe
from mlx_engine.bench.work import Sizes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "concurrency.jsonl"
MODEL = "shape:qwen3-0.6b"
SEQUENCES = (1, 4, 8, 16, 32)
# Tokens of each sequence before the first step.
DEPTH = 128
STEPS, ROUNDS = 8, 7
# Tokens of context, beside the prompt, for the tokens that a run generates.
SPARE = 64
# llama.cpp's default, and settings that may be faster on some machines.
SETTINGS: Mapping[str, dict[str, Any]] = {
    LLAMA: {},
    f"{LLAMA}, no flash attention": {"flash_attention": False},
    f"{LLAMA}, float32 cache": {"float32_cache": True},
}


def main() -> None:
    """Measure all numbers of sequences."""
    parser = argparse.ArgumentParser(prog="benchmarks.concurrency", description="Decode of several sequences.")
    parser.add_argument("--model", default=MODEL, help=f"a GGUF file, or {MODEL}")
    parser.add_argument("--depth", type=int, default=DEPTH, help="tokens of each sequence before the first step")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--python", action="append", default=[], metavar=f"{LLAMA}=PATH", help="its interpreter")
    options = parser.parse_args()
    log = Log("concurrency", RESULTS)
    path = resolve(options.model)
    pythons = interpreters(dict(item.partition("=")[::2] for item in options.python))
    row = {
        **describe(open_checkpoint(path)), "depth": options.depth, "threads": usable_cores(),
        **measure(path, pythons, options.depth, options.rounds), "load_average": os.getloadavg(),
    }  # fmt: skip
    print("\n".join(report_lines(row)))
    log.append(row)


def measure(path: Path, pythons: Mapping[str, str], depth: int, rounds: int) -> Row:
    """Return every sample and the medians in tokens/s, by engine and number of sequences, and the machine's limits."""
    common = {"model": str(path), "n_sequences": max(SEQUENCES), "depth": depth, "spare": SPARE}
    found: dict[str, dict[str, list[float]]] = {}
    absent, limits = {}, list[dict[str, float]]()
    with ExitStack() as stack:
        ours = stack.enter_context(Process("ours", pythons[OURS], **common, backend="parallel"))
        processes = {OURS: ours}
        for name, setting in SETTINGS.items():
            try:
                process = Process("llama", pythons[LLAMA], **common, threads=usable_cores(), **setting)
                processes[name] = stack.enter_context(process)
            except PeerError as error:
                absent[name] = str(error)
        found = {name: {str(n): [] for n in SEQUENCES} for name in processes}
        runs = [(name, n) for n in SEQUENCES for name in processes]
        for number in range(rounds):
            limits.append(ours.ask("limits"))
            for name, n in runs if number % 2 == 0 else reversed(runs):
                seconds = processes[name].ask("decode", n_sequences=n, n_steps=STEPS)["seconds"]
                found[name][str(n)].append(n * len(seconds) / sum(seconds))
        facts = {name: process.facts for name, process in processes.items()}
    reached = {name: statistics.median(one[name] for one in limits) for name in ("read_gbs", "peak_gflops")}
    medians = {name: {n: statistics.median(rates) for n, rates in of.items()} for name, of in found.items()}
    sizes = Sizes(**facts[OURS]["sizes"])
    limits_ts = {str(n): limit(sizes, n, depth, reached["read_gbs"], reached["peak_gflops"]) for n in SEQUENCES}
    return {
        "samples_ts": found, "medians_ts": medians, "limits_ts": limits_ts, **reached, "absent": absent, "facts": facts,
    }  # fmt: skip


def fastest(row: Row, n: str) -> float | None:
    """Return the rate of llama.cpp's fastest setting for a number of sequences; None if it was not measured."""
    return max((of[n] for name, of in row["medians_ts"].items() if name != OURS), default=None)


def report_lines(row: Row) -> list[str]:
    """Return a line per number of sequences: our rate, its gain over one sequence, llama.cpp's, and the limits."""
    ours, lines = row["medians_ts"][OURS], [f"{name}: {why}" for name, why in row["absent"].items()]
    for n, rate in ours.items():
        theirs, (memory, arithmetic) = fastest(row, n), row["limits_ts"][n]
        compared = "" if theirs is None else f"{LLAMA} {theirs:.1f}, factor {rate / theirs:.2f}; "
        lines.append(
            f"{n:>4} sequences: {rate:7.1f} tokens/s, {rate / ours['1']:.2f} times one; {compared}"
            f"limits {memory:.0f} by memory, {arithmetic:.0f} by arithmetic, {rate / min(memory, arithmetic):.0%}"
        )
    return lines


if __name__ == "__main__":
    main()
