"""A cell of a benchmark: one test on one engine, repeated.

The tests are those of llama.cpp's llama-bench. `pp512` is the prefill of 512 tokens, `tg64` the decode of 64 tokens in
64 passes, and `pp512+tg64` is the prefill followed by the decode. `@ d4096` means at depth 4,096 (tokens already in the
context). Prompts are random token ids, and end tokens do not end an answer. The times of the first run, the warm-up,
count only if the time budget allows no other run. Without a KV cache, every pass runs the whole sequence, context
included.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_engine.backends.observed import profiled
from mlx_engine.bench.samples import Result, Test, check_context, rest
from mlx_engine.cache import SequenceInput
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.engine import CheckedCheckpoint, Engine
from mlx_engine.errors import require
from mlx_engine.loop.forward import forward_logits
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import NoText, Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.observe.profiler import Profiler
from mlx_engine.options import Options
from mlx_engine.weights.model import Model


class TimedTest:
    """A test that is run step by step.

    Attributes:
        request: the request of the test. Its metrics have the time of each pass: first of the prefill, if the test has
            a prompt, then of each decode pass.
    """

    def __init__(
        self,
        model: Model,
        test: Test,
        ids: Sequence[int],
        *,
        kv: bool = True,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prefill the context of the test, and submit the request.

        `ids` are the tokens of the context, then those of the prompt, or one more token if the test has no prompt. With
        `overlap` and `kv`, a lazy backend submits a pass before the previous one has ended.
        """
        self.request = _request(ids, test.n_gen + (test.n_prompt > 0), clock)
        self._n_cached = test.depth if kv else 0
        if not kv:
            pool = model.new_pool(self.request.longest, longest_pass=self.request.longest, kept=False)
            self._scheduler = Scheduler(model, pool, clock=clock)
        else:
            # The pool and prefix cache of the previous test refer to each other, so only the garbage collector frees
            # them. The new pool then reuses their memory. Without `gc.collect`, page faults took 120 of the 1,380 ms in
            # which the shape of Qwen3 0.6B prefills 512 tokens.
            gc.collect()
            # With a context, the pool has room for a second sequence, because the test's sequence copies the last page
            # of the context, which the prefix cache still holds.
            pool = model.new_pool(self.request.longest, n_sequences=2 if self._n_cached else 1)
            prefix = PrefixCache(pool) if self._n_cached else None
            self._scheduler = Scheduler(model, pool, prefix=prefix, overlap=overlap, clock=clock)
        if self._n_cached:
            context = _request(ids[: test.depth], 0, clock)
            self._scheduler.submit(context)
            while not context.has_ended:
                self._step(context)
        self._scheduler.submit(self.request)

    @property
    def n_passes(self) -> int:
        """Number of timed passes that have ended."""
        return len(self.request.metrics.passes)

    def step(self) -> None:
        """Run one step. If the request fails, raise its error."""
        self._step(self.request)
        if self.request.n_cached != self._n_cached:
            found = f"{self.request.n_cached} of {self._n_cached}"
            raise RuntimeError(f"expected the whole context in the prefix cache, found {found} tokens")

    def run(self) -> Metrics:
        """Run the test to its end, and return the times of its passes."""
        while not self.request.has_ended:
            self.step()
        return self.request.metrics

    def _step(self, request: Request) -> None:
        self._scheduler.step()
        if request.error is not None:
            raise request.error


def _request(ids: Sequence[int], n_new: int, clock: Callable[[], float]) -> Request:
    """Return a greedy request for `n_new` tokens, which are not decoded to text."""
    options = Options(ignore_eos=True)
    return Request(ids, options, [Output(options, max_tokens=n_new, text=NoText(), end_ids=())], metrics=Metrics(clock))


# The time of a long prompt is estimated from prefills of these lengths.
PROBES = (4, 64)


def measure(
    engine: Engine,
    test: Test,
    *,
    kv: bool = True,
    overlap: bool = True,
    repetitions: int = 5,
    budget: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    between: Callable[[], None] = lambda: None,
) -> Result:
    """Run a test `repetitions` times, after a warm-up run.

    `budget` limits the seconds of the warm-up and all repetitions. If it is too small, fewer repetitions are run. If
    only the warm-up run fits, its times are the result. If no run fits, a part of the test is run and the rest is
    extrapolated; `Result.estimated` names the part. `between` is called before every run and after the last one, for
    example to measure the machine's limits. `progress` is called with (number of ended runs, number of all runs).

    Raises:
        OptionError: the test is empty, or does not fit the model's context; `repetitions` or `budget` is invalid.
    """
    message = "repetitions must be at least 1"
    require(repetitions >= 1, option="repetitions", expected="at least 1", found=repetitions, message=message)
    message = f"budget: {budget} is no number of seconds"
    require(budget is None or budget >= 0, option="budget", expected="seconds >= 0", found=budget, message=message)
    check(test, engine)
    ids = random.Random(seed).choices(range(engine.config.vocab_size), k=test.depth + max(test.n_prompt, 1))
    deadline = None if budget is None else time.perf_counter() + budget
    progress(0, repetitions + 1)
    between()
    n_read = test.depth + test.n_prompt
    if deadline is not None and n_read > PROBES[-1]:
        n_probed, per_token = _probe(engine, ids[:n_read], deadline)
        if time.perf_counter() + per_token * n_read > deadline:
            result = _estimate(engine, test, ids[:1], per_token, kv=kv, overlap=overlap, deadline=deadline)
            result.estimated = f"from a pass of {n_probed} tokens"
            return result
    runs: list[Result] = []
    while len(runs) <= repetitions and (not runs or deadline is None or time.perf_counter() < deadline):
        run = _run(engine, test, ids, kv=kv, overlap=overlap, deadline=deadline)
        if not (run.estimated and runs):
            runs.append(run)
            between()
            progress(len(runs), repetitions + 1)
        if run.estimated:
            break
    counted = runs[1:] or runs
    return Result(
        test,
        [seconds for run in counted for seconds in run.seconds],
        [passes for run in counted for passes in run.passes],
        counted[0].estimated,
    )


def check(test: Test, engine: Engine | CheckedCheckpoint) -> None:
    """Raise OptionError if the test is empty, or does not fit the model's context."""
    message = "the test has neither prompt tokens nor tokens to generate"
    require(test.n_tokens > 0, option="test", expected="a number of tokens", found=test.n_tokens, message=message)
    check_context(test.name, test.depth + test.n_tokens, engine.config.context_length)


def _probe(engine: Engine, ids: list[int], deadline: float) -> tuple[int, float]:
    """Time two prefills of each length in `PROBES`, as far as the deadline allows.

    Return the length and the seconds per token of the last prefill.
    """
    probed, per_token = 0, 0.0
    with engine.backend.session():
        for n in PROBES:
            for _ in range(2):
                start = time.perf_counter()
                if probed and start + n * per_token > deadline:
                    break
                engine.backend.wait(forward_logits(engine.model, SequenceInput(ids[:n], engine.model.scratch_kv(n))))
                probed, per_token = n, (time.perf_counter() - start) / n
    return probed, per_token


def _estimate(
    engine: Engine, test: Test, first: list[int], per_token: float, *, kv: bool, overlap: bool, deadline: float
) -> Result:
    """Estimate a test whose context and prompt take longer than the budget.

    `per_token` is the seconds of prefill per token. Decode is measured after the single token in `first`.
    """
    result = Result(test, [per_token * test.n_prompt], [])
    if test.n_gen:
        part = _run(engine, Test(n_gen=test.n_gen), first, kv=kv, overlap=overlap, deadline=deadline)
        result.passes, result.seconds = part.passes, [result.seconds[0] + part.seconds[0]]
    return result


def _run(engine: Engine, test: Test, ids: list[int], *, kv: bool, overlap: bool, deadline: float | None) -> Result:
    """Run the test once. If the deadline passes during decode, extrapolate the times of the remaining passes."""
    n_prefills = 1 if test.n_prompt else 0
    with engine.backend.session():
        timed = TimedTest(engine.model, test, ids, kv=kv, overlap=overlap, clock=time.perf_counter)
        while not timed.request.has_ended:
            timed.step()
            if deadline is not None and timed.n_passes > n_prefills and time.perf_counter() > deadline:
                break
    metrics = timed.request.metrics
    prefill, decode = metrics.passes[:n_prefills], metrics.passes[n_prefills:]
    result = Result(test, seconds=[sum(prefill)])
    if len(decode) < test.n_gen:
        result.estimated = f"from {len(decode)} of {test.n_gen} passes"
    if decode:
        first = len(ids) + n_prefills
        lengths = [1 if kv else first + i for i in range(test.n_gen)]
        result.passes = [decode]
        result.seconds[0] += sum(decode) + sum(rest(decode, lengths))
    return result


# The largest number of passes to profile.
PROFILED = 5


def affordable(result: Result, seconds: float) -> int:
    """Return how many passes of a measured test fit into `seconds`, at most `PROFILED`."""
    times = [s for passes in result.passes for s in passes] if result.test.n_gen else result.seconds
    if not times or (result.estimated and not result.test.n_gen):
        return 0
    return min(PROFILED, int(seconds / statistics.median(times)))


def components(engine: Engine, test: Test, n_passes: int, *, seed: int = 0) -> dict[str, Any] | None:
    """Profile the prefill of `test`, or one decode pass if the test has no prompt, with a KV cache.

    Repeat this `n_passes` times, and return the values of the repetition with the median duration: "ms", its
    milliseconds; "ops", the milliseconds, calls, FLOPs and bytes of each operation; "parts", the milliseconds of each
    part of the model. Return None if the test has both prefill and decode, or `n_passes` is 0.
    """
    if n_passes < 1 or (test.n_prompt and test.n_gen):
        return None
    found = sorted((_profiled(engine, test, seed) for _ in range(n_passes)), key=lambda taken: float(taken["ms"]))
    return found[len(found) // 2]


def _profiled(engine: Engine, test: Test, seed: int) -> dict[str, Any]:
    profiler = Profiler()
    model = copy.copy(engine.model)
    model.run_on(profiled(engine.backend, profiler))
    ids = random.Random(seed).choices(range(engine.config.vocab_size), k=test.depth + max(test.n_prompt, 1))
    one = Test(n_prompt=test.n_prompt, n_gen=0 if test.n_prompt else 1, depth=test.depth)
    with model.backend.session():
        timed = TimedTest(model, one, ids)
        profiler.clear()
        timed.run()
    ms = {name: seconds * 1e3 for name, seconds in profiler.phases.items()}
    ops = {
        name: {"calls": op.calls, "ms": op.seconds * 1e3, "flops": op.flops, "nbytes": op.nbytes}
        for name, op in sorted(profiler.ops.items(), key=lambda item: -item[1].seconds)
    }
    # A backend may fuse the last norm with the output head, so they are one part here.
    of_parts = {"embedding": ["embedding"], "layers": ["layers"], "head": ["norm", "projection"]}
    parts = {part: sum(ms.get(name, 0.0) for name in names) for part, names in of_parts.items()}
    return {"ms": sum(op["ms"] for op in ops.values()), "ops": ops, "parts": parts}
