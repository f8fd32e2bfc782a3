"""Run the rounds of a report: a plain run and a profiled run each, with samples of the machine's limits between them.

Both kinds of run do the same: prefill, then decode. A plain run is as fast as the backend. In a profiled run every
operation is timed, layers run operation by operation, and a lazy backend waits for each operation. Profiled runs
measure the parts, plain runs the whole.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_engine.backends.profiled import profiled
from mlx_engine.bench.cells import TimedTest
from mlx_engine.bench.samples import Test
from mlx_engine.engine import Engine
from mlx_engine.loop.metrics import Metrics
from mlx_engine.observe.profiler import Profiler, Span

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
    profiled: Sequence[Pass]


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
    progress(0, repetitions + 1)
    while len(rounds) <= repetitions:
        between()
        plain = run_plain(engine, test, ids, clock)
        between()
        rounds.append(Round(plain, run_profiled(engine, test, ids, clock)))
        progress(len(rounds), repetitions + 1)
        spent = time.perf_counter() - start
        if budget is not None and spent + spent / len(rounds) > budget:
            break
    between()
    return rounds[1:] or rounds


def run_plain(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> Metrics:
    """Run the test as `generate` does."""
    with engine.backend.session():
        return TimedTest(engine.model, test, ids, clock=clock).run()


def run_profiled(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> list[Pass]:
    """Run the test on a copy of the backend that times every operation."""
    profiler = Profiler(clock, keep=True)
    model = copy.copy(engine.model)
    model.run_on(profiled(engine.backend, profiler))
    found = list[Pass]()
    with model.backend.session():
        timed = TimedTest(model, test, ids, clock=clock)
        profiler.take_spans()  # discard the spans of filling the context
        while not timed.request.has_ended:
            timed.step()
            if timed.n_passes > len(found):
                found.append(Pass(profiler.take_spans(), timed.request.metrics.passes[-1]))
    return found
