"""Run the rounds of a report: a plain run and a profiled run each, with samples of the machine's limits between them.

Both kinds of run do the same: prefill, then decode. A plain run is as fast as the backend. In a profiled run every
operation is timed, layers run operation by operation, and a lazy backend waits for each operation: it measures the
parts, and plain runs measure the whole.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from mlx_engine.backends.profiled import profiled
from mlx_engine.bench.samples import Test
from mlx_engine.cache import New
from mlx_engine.decode.loop import decode, prefill
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.step import forward_logits
from mlx_engine.engine import Engine
from mlx_engine.observe.profiler import Profiler
from mlx_engine.observe.spans import Span
from mlx_engine.options import Sampling

Clock = Callable[[], float]


@dataclass(frozen=True)
class Pass:
    """A profiled pass: its spans, and its seconds in all, profiling included."""

    spans: Sequence[Span]
    seconds: float


@dataclass(frozen=True)
class Round:
    """A plain run and a profiled run; the first pass of both is prefill."""

    plain: Metrics
    apart: Sequence[Pass]


def measure(
    engine: Engine,
    test: Test,
    repetitions: int,
    *,
    budget: float | None = None,
    between: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    clock: Clock = time.perf_counter,
) -> list[Round]:
    """Run a warm-up round, then `repetitions` rounds, or fewer if the `budget` of seconds ends; at least one.

    If there is time for one round only, the warm-up round counts. `between` is called before every run and after the
    last.
    """
    ids = random.Random(0).choices(range(engine.config.vocab_size), k=test.depth + test.n_prompt)
    start, rounds = time.perf_counter(), list[Round]()
    while len(rounds) <= repetitions:
        between()
        plain = run_plain(engine, test, ids, clock)
        between()
        rounds.append(Round(plain, run_apart(engine, test, ids, clock)))
        progress(len(rounds), repetitions + 1)
        spent = time.perf_counter() - start
        if budget is not None and spent + spent / len(rounds) > budget:
            break
    between()
    return rounds[1:] or rounds


def run_plain(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> Metrics:
    """Run the test as `generate` does."""
    model, be = engine.model, engine.backend
    pick, metrics = Sampler(be, Sampling(), ids), Metrics(clock)
    with be.session():
        kv = model.new_kv(test.depth + test.n_tokens)
        if test.depth:
            be.wait(prefill(model, ids[: test.depth], kv))
        for _ in islice(decode(model, ids[test.depth :], kv, pick, metrics), 1 + test.n_gen):
            pass
    return metrics


def run_apart(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> list[Pass]:
    """Run the test on a copy of the backend that times every operation."""
    profiler = Profiler(clock, keep=True)
    model = copy.copy(engine.model)
    model.backend = be = profiled(engine.backend, profiler)
    pick, found = Sampler(be, Sampling(), ids), list[Pass]()
    with be.session():
        kv = model.new_kv(test.depth + test.n_tokens)
        if test.depth:
            be.wait(prefill(model, ids[: test.depth], kv))
        read = partial(prefill, model, ids[test.depth :], kv)
        for _ in range(1 + test.n_gen):
            profiler.begin_pass()
            start = clock()
            token = pick(read())
            found.append(Pass(profiler.spans, clock() - start))
            read = partial(forward_logits, model, New([token], kv))
    return found
