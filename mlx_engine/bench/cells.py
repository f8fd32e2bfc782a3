"""A cell of a benchmark: one test on one engine, repeated. Prefill and decode are never mixed.

The tests are those of llama.cpp's llama-bench: `pp512` reads 512 tokens; `tg64` writes 64, each a pass of its own,
after `@ d4096` tokens of context; `pp512+tg64` does both. Tokens are random, end tokens are ignored, tokenisation is
left out, and so is a first run that nobody times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.backends.sampling import Sampling
from mlx_engine.decode.loop import decode, decode_without_cache, prefill
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Sampler
from mlx_engine.engine import Engine
from mlx_engine.errors import require

# Tokens of the pass that tells how long a prompt would take.
PROBE = 8


@dataclass(frozen=True)
class Test:
    """What is run: read `n_prompt` tokens, then write `n_gen`, behind `depth` tokens that are not timed."""

    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """llama-bench's name for it."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens that the test's time is divided by."""
        return self.n_prompt + self.n_gen


@dataclass
class Result:
    """The samples of a cell.

    Attributes:
        seconds: the time of the test, one per repetition.
        passes: seconds of each pass that wrote a token, one list per repetition.
        estimated: why the samples are no measurement of the whole test, or None if they are one.
    """

    test: Test
    seconds: list[float] = field(default_factory=list)
    passes: list[list[float]] = field(default_factory=list)
    estimated: str | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens per second, one per repetition."""
        return [self.test.n_tokens / seconds for seconds in self.seconds]

    def summary(self) -> dict[str, Any]:
        """Mean, standard deviation (n - 1) and median of the rates, and all samples."""
        rates = self.rates
        return {
            "test": self.test.name,
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.depth,
            "avg_ts": statistics.fmean(rates),
            "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "median_ts": statistics.median(rates),
            "samples_ts": rates,
            "samples_s": self.seconds,
            "passes_s": self.passes,
            "estimated": self.estimated,
        }


def measure(
    engine: Engine,
    test: Test,
    *,
    kv: bool = True,
    repetitions: int = 5,
    budget: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Run a test `repetitions` times after one that is not timed.

    With a `budget` in seconds for the whole cell, a test that would not fit is run in part, at least one pass of it,
    and its time is extrapolated; the result says so.
    """
    length, context = test.depth + test.n_tokens, engine.config.context_length
    require(length <= context, option=test.name, expected=f"at most {context:,} tokens, the context", found=length)
    ids = random.Random(seed).choices(range(engine.config.vocab_size), k=test.depth + max(test.n_prompt, 1))
    result = Result(test)
    deadline = None if budget is None else time.perf_counter() + budget
    if test.n_prompt and budget is not None:
        expected = _probe(engine, ids) * test.n_prompt * (repetitions + 1)
        if expected > budget:
            result.estimated = f"from a pass of {PROBE} tokens"
            result.seconds = [expected / (repetitions + 1)]
            return result
    warm_up = deadline is None or not test.n_gen
    for i in range(repetitions + warm_up):
        run = _run(engine, test, ids, kv=kv, deadline=deadline)
        if i >= warm_up or run.estimated:
            result.seconds += run.seconds
            result.passes += run.passes
        result.estimated = result.estimated or run.estimated
        if progress is not None:
            progress(i + 1, repetitions + warm_up)
        if deadline is not None and time.perf_counter() > deadline:
            break
    return result


def _probe(engine: Engine, ids: list[int]) -> float:
    """Seconds per token of a short prompt."""
    few = (ids * PROBE)[:PROBE]
    with engine.backend.session():
        start = time.perf_counter()
        engine.backend.wait(engine.model.forward(few, engine.model.no_cache()))
        return (time.perf_counter() - start) / PROBE


def _run(engine: Engine, test: Test, ids: list[int], *, kv: bool, deadline: float | None) -> Result:
    """One repetition."""
    model, be = engine.model, engine.backend
    pick = Sampler(be, Sampling(), ())
    result = Result(test)
    cache = model.new_cache(len(ids) + test.n_gen + 1)
    total = 0.0
    with be.session():
        if kv and test.depth:
            be.wait(prefill(model, ids[: test.depth], cache))
        if test.n_prompt:
            start = time.perf_counter()
            pick(prefill(model, ids[test.depth :], cache) if kv else model.forward(ids, model.no_cache()))
            total += time.perf_counter() - start
    if not test.n_gen:
        result.seconds = [total]
        return result
    metrics = Metrics()
    # One token stands in for the prompt's last; its pass belongs to no test.
    last = ids[-1:]
    loop = decode(model, last, cache, pick, metrics) if kv else decode_without_cache(model, ids, pick, metrics)
    next(loop)
    while len(metrics.passes) <= test.n_gen:
        next(loop)
        if deadline is not None and time.perf_counter() > deadline:
            break
    passes = metrics.passes[1:]
    if len(passes) < test.n_gen:
        result.estimated = f"from {len(passes)} of {test.n_gen} passes"
    result.passes = [passes]
    result.seconds = [total + sum(passes) * test.n_gen / len(passes)]
    return result
