"""Measure decode of 1 to 32 sequences in one forward pass, in tokens per second, and the machine's two limits.

    python -m benchmarks.batch [MODEL [DEPTH]]      appends to benchmarks/results/batch.jsonl, every sample kept

The compiled CPU backend runs B sequences, each after DEPTH tokens of its own; the numbers of sequences are interleaved.
A step reads one token of every sequence and chooses the next. There are two limits. The limit by memory is the rate if
a step took only the time to read all weights, keys and values once at the memory bandwidth. The limit by arithmetic is
the rate if a step took only the time of all multiplications at the peak. Bandwidth and peak are measured on this
machine before each round.
"""

from __future__ import annotations

import statistics
import sys

import mlx_engine
from benchmarks.log import FOLDER, Log, Row
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.bench.roofline import Limits, matrices
from mlx_engine.bench.work import Sizes, bytes_per_weight, sizes
from mlx_engine.cache.pool import PAGE
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.loop.output import NoText, Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options

RESULTS = FOLDER / "batch.jsonl"

SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Tokens of each sequence before the first step.
DEPTH = 128
STEPS, ROUNDS = 4, 7


def main(source: str = "shape:qwen3-0.6b", depth: str = str(DEPTH)) -> None:
    """Measure all numbers of sequences."""
    log = Log("batch", RESULTS)
    engine = mlx_engine.load(source, "parallel", speculate="off")
    if not isinstance(engine.backend, CompiledBackend):
        raise SystemExit("there are no compiled kernels here, so there is nothing to measure")
    checkpoint = open_checkpoint(engine.path)
    of = sizes(checkpoint, lambda type_: bytes_per_weight(engine.backend, type_))
    limits = Limits(matrices(engine, checkpoint), engine.backend.threads)
    found = measure(engine, limits, int(depth))
    row: Row = {"model_name": engine.path.stem, "threads": engine.backend.threads, "depth": int(depth), **found}
    row["limits_ts"] = {str(n): limit(of, n, int(depth), row["read_gbs"], row["peak_gflops"]) for n in SEQUENCES}
    for n, rate in row["medians_ts"].items():
        memory, arithmetic = row["limits_ts"][n]
        share = rate / min(memory, arithmetic)
        print(
            f"{n:>4} sequences: {rate:7.1f} tokens/s; limit {memory:7.1f} by memory, {arithmetic:7.1f} by arithmetic; "
            f"{share:.0%} of the smaller"
        )
    log.append(row)


def measure(engine: mlx_engine.Engine, limits: Limits, depth: int) -> Row:
    """Return every sample, the medians in tokens/s by number of sequences, and the machine's limits."""
    model, n_vocab, most = engine.model, engine.config.vocab_size, max(SEQUENCES)
    # The prefix cache holds all tokens of a prompt but the last, so that every step reads one token per sequence.
    pool = model.new_pool(most * (depth + STEPS + PAGE), n_sequences=2 * most)
    scheduler = Scheduler(model, pool, slots=most, prefix=PrefixCache(pool), overlap=False)
    prompts = [[(7 * i + 3 * b) % n_vocab for i in range(depth)] for b in range(most)]
    samples: dict[str, list[float]] = {str(n): [] for n in SEQUENCES}
    with engine.backend.session():
        run(scheduler, prompts, 0)
        for counted in range(-1, ROUNDS):
            limits.sample()
            for n in SEQUENCES:
                seconds = run(scheduler, [[*prompts[b], b % n_vocab] for b in range(n)], STEPS)
                if counted >= 0:  # skip the first round, in which weights and pages are not in memory yet
                    samples[str(n)].append(n * STEPS / seconds)
    medians = {n: statistics.median(rates) for n, rates in samples.items()}
    return {"samples_ts": samples, "medians_ts": medians, **limits.take()}


def run(scheduler: Scheduler, prompts: list[list[int]], n_new: int) -> float:
    """Run all prompts together, each with the same number of new tokens; return the seconds of the passes."""
    options = Options(ignore_eos=True)
    for prompt in prompts:
        output = Output(options, max_tokens=n_new, text=NoText(), end_ids=())
        scheduler.submit(Request(prompt, options, [output]))
    seconds = 0.0
    while scheduler.has_work:
        seconds += scheduler.step().seconds
    return seconds


def limit(of: Sizes, n: int, depth: int, read_gbs: float, peak_gflops: float) -> tuple[float, float]:
    """Return the limits in tokens/s of n sequences by memory bandwidth and by arithmetic."""
    nbytes = of.nbytes + n * of.cached * depth
    flops = 2.0 * (of.layers + of.head + of.scored * depth)
    return n * read_gbs * 1e9 / nbytes, peak_gflops * 1e9 / flops


if __name__ == "__main__":
    main(*sys.argv[1:])
