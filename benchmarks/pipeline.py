"""Compare a pipeline of ranks, pinned to one core each, with one rank on one core: `python -m benchmarks.pipeline`.

In each round, first the single rank generates 8 sequences at once, then the pipeline generates the same sequences; the
ratio of their rates is the median over rounds. The peak memory of each rank (VmHWM) and a time line of the last passes
are printed, too. Other programs on the machine disturb this measurement much, because even a waiting rank needs its
core: MLX's ring polls its sockets. So a second ratio compares the CPU time of the single rank with that of the busiest
of several ranks. This second ratio is the speedup on free cores if no rank ever waited.

`--prompt` sets how many tokens are in the cache of each sequence; without `--split`, layers are divided so that the
ranks are balanced for about 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.planned import pinned
from benchmarks.relay import ranks

SEQUENCES, TOKENS, PROMPT = 8, 48, 16


def rank(model: str, quant: str, split: str | None, prompt: int) -> dict[str, Any]:
    """Generate as one rank, or alone; return the rate of decode, the peak memory and the CPU time of the passes."""
    from mlx_engine.cache.pool import CacheSize
    from mlx_engine.distributed.pipeline import parsed
    from mlx_engine.distributed.shard import join
    from mlx_engine.engine import Engine, open_source
    from mlx_engine.options import Options

    shard = None if split is None else join("pipeline", parsed(split) if split != "auto" else None)
    opened = open_source(model, "parallel", quant, threads=1, shard=shard)
    if shard is not None and not shard.is_leader:
        began = time.thread_time()
        opened.follow()
        shard.close()
        return {"peak": peak(), "cpu": time.thread_time() - began}
    engine = Engine(opened)
    # An eighth more memory than all sequences fill, for partly filled pages.
    memory = SEQUENCES * CacheSize(engine.model.kv_layers, prompt + TOKENS).whole * 9 // 8
    scheduler = engine.scheduler(slots=SEQUENCES, prefix_cache=False, kv_memory=memory)
    requests = [
        engine.request([1 + i + t for t in range(prompt)], Options.of(TOKENS, ignore_eos=True))
        for i in range(SEQUENCES)
    ]
    began = time.thread_time()
    for request in requests:
        scheduler.submit(request)
    while any(not request.output.token_ids for request in requests):
        scheduler.step()
    start, before = time.perf_counter(), sum(len(request.output.token_ids) for request in requests)
    while scheduler.has_work:
        scheduler.step()
    n = sum(len(request.output.token_ids) for request in requests) - before
    seconds, cpu = time.perf_counter() - start, time.thread_time() - began
    ids = [request.output.token_ids for request in requests]
    found = {"rate": n / seconds, "peak": peak(), "cpu": cpu, "ids": ids}
    if shard is not None:
        shard.close(timeline=True)
        found |= {"timeline": shard.timeline, "notes": shard.notes}
    engine.close()
    return found


def peak() -> int:
    """Return the peak resident memory of this process, in bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0 if match is None else int(match[1]) << 10


def run(given: argparse.Namespace, n: int, split: str | None) -> list[dict[str, Any]]:
    """Run n ranks, each on a core of its own, and return what each reports."""
    command = ["-m", "benchmarks.pipeline", "--rank", "--model", given.model]
    command += ["--quant", given.quant, "--prompt", str(given.prompt)]
    command += [] if split is None else ["--split", split]
    with ranks(command, n) as started:
        ended = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(errors for _, errors in ended))
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def main() -> None:
    """Parse the options, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--quant", default="keep", help="conversion of linear layers, as on the command line")
    parser.add_argument("--split", default=None, help="layers of each rank; by default decided by speed")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens of each prompt; by default {PROMPT}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        pinned()
        print(json.dumps(rank(given.model, given.quant, given.split, given.prompt)))
        return
    split = given.split or "auto"
    ratios, peaks, works = [], [], []
    for number in range(given.rounds):
        (alone,) = run(given, 1, None)
        shared = run(given, given.ranks, split)
        if shared[0]["ids"] != alone["ids"]:
            raise RuntimeError("expected the tokens of one process, found others")
        ratios.append(shared[0]["rate"] / alone["rate"])
        peaks.append(max(of["peak"] for of in shared) / alone["peak"])
        works.append(alone["cpu"] / max(of["cpu"] for of in shared))
        rates = f"{alone['rate']:.1f} tokens/s alone, {shared[0]['rate']:.1f} shared"
        mib = ", ".join(f"{of['peak'] >> 20}" for of in shared)
        cpu = ", ".join(f"{of['cpu']:.1f}" for of in shared)
        print(f"round {number}: {rates}, ratio {ratios[-1]:.2f}")
        print(f"  CPU s {alone['cpu']:.1f} alone, {cpu} shared, ratio {works[-1]:.2f}")
        print(f"  peak MiB {alone['peak'] >> 20} alone, {mib} shared")
    print("\n".join([*shared[0]["notes"], *shared[0]["timeline"]]))
    print(f"median ratio {statistics.median(ratios):.2f}, by CPU time {statistics.median(works):.2f}")
    print(f"largest rank's memory {statistics.median(peaks):.2f} of one")


if __name__ == "__main__":
    main()
