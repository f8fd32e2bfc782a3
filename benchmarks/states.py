"""Compare with llama.cpp on models whose layers have states or latents: rates at several depths, bytes of the cache.

    python -m benchmarks.states --python PATH      appends to benchmarks/results/states.jsonl
    python -m benchmarks.states --python PATH --model FILE.gguf --depths 0 --rounds 3 --out new.jsonl
    python -m benchmarks.states --python PATH --model shape:deepseek-v2-lite-4 --depths 4096 --tests tg
    python -m benchmarks.states --python PATH --model shape:nemotron-h-4 --depths 4096 --tests tg

PATH is a Python interpreter that has llama-cpp-python. llama.cpp runs with and without flash attention, and the faster
setting counts. This engine and each setting of llama.cpp have one process each, and are interleaved. A state cannot be
set back to an earlier token, so before each test both engines compute the context again; this is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.log import FOLDER, Log, Row
from benchmarks.peers.contests import LLAMA, OURS, SPARE, Contestant, asked, interpreters, opened
from benchmarks.peers.process import Process
from mlx_engine.bench.origin import describe
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "states.jsonl"
MODEL = "shape:qwen3.5-0.8b"
DEPTHS, ROUNDS, N_PROMPT, N_GEN = (0, 4096), 5, 512, 32
WARM = Test(n_prompt=64, n_gen=4)
TESTS = ("tg", "pp")


def main() -> None:
    """Measure, and print a line per test and depth."""
    parser = argparse.ArgumentParser(prog="benchmarks.states", description="Measure a model with states.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--model", default=MODEL, help=f"a GGUF file, or a shape such as {MODEL}")
    parser.add_argument("--tests", default=",".join(TESTS), help="tg generates tokens, pp reads a prompt")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="tokens before the measured ones")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    log = Log("states", options.out)
    depths = [int(depth) for depth in options.depths.split(",")]
    tests = options.tests.split(",")
    if unknown := set(tests) - set(TESTS):
        parser.error(f"--tests: expected names among {', '.join(TESTS)}, found {', '.join(sorted(unknown))}")
    for row in rows(resolve(options.model), options.python, depths, options.rounds, tests):
        log.append(row)


def rows(path: Path, python: str, depths: Sequence[int], rounds: int, tests: Sequence[str] = TESTS) -> Iterator[Row]:
    """Yield a row per test and contestant."""
    facts, context = describe(open_checkpoint(path)), max(depths) + N_PROMPT + SPARE
    theirs = [Contestant(LLAMA, {"flash_attention": uses}, threads=usable_cores()) for uses in (True, False)]
    contestants = (Contestant(OURS, {"backend": "parallel"}), *theirs)
    with ExitStack() as stack:
        pythons = interpreters({LLAMA: python})
        pairs = [
            (one, stack.enter_context(opened(one, pythons, model=str(path), context=context))) for one in contestants
        ]
        for contestant, process in pairs:
            timed(process, contestant, WARM)
        for depth in depths:
            of_depth = {"tg": Test(n_gen=N_GEN, depth=depth), "pp": Test(n_prompt=N_PROMPT, depth=depth)}
            for test in (of_depth[name] for name in tests):
                done = [[timed(process, one, test) for one, process in pairs] for _ in range(rounds)]
                print(line(test, done), flush=True)
                for i, one in enumerate(contestants):
                    seconds, caches = [found[i]["seconds"] for found in done], [found[i]["cache"] for found in done]
                    yield {"what": test.name, "engine": one.engine, "setting": one.setting, "depth": depth, **facts,
                           "n_prompt": test.n_prompt, "n_gen": test.n_gen, "seconds": seconds,
                           "cache": caches[0]}  # fmt: skip


def timed(process: Process, contestant: Contestant, test: Test) -> dict[str, Any]:
    """Return the seconds of a test after `test.depth` tokens, and the bytes of the cache at its end."""
    if test.depth:
        process.ask("fill", n=test.depth)
    return {**process.ask("run", **asked(test, contestant)), "cache": process.ask("cache")}


def line(test: Test, done: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return rates of this engine and of llama.cpp's faster setting, the median factor, and the bytes of our cache."""
    ours, *others = ([found[i]["seconds"] for found in done] for i in range(len(done[0])))
    theirs = min(others, key=statistics.median)
    rates = [test.n_tokens / statistics.median(seconds) for seconds in (ours, theirs)]
    factor = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    cache = done[0][0]["cache"]
    return (
        f"{test.name}: {rates[0]:.1f} tokens/s, llama.cpp {rates[1]:.1f}, factor {factor:.2f}; after "
        f"{cache['tokens']:,} tokens the state has {cache['state_bytes'] / 1e6:.1f} MB, "
        f"keys and values {cache['kv_bytes'] / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
