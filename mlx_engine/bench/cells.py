"""A cell of a benchmark: one test on one engine, repeated. Prefill and decode are measured separately.

The tests are those of llama.cpp's llama-bench: `pp512` is the prefill of 512 tokens; `tg64` the decode of 64 tokens,
one forward pass each; `@ d4096` means at depth 4,096 (tokens already in the context); `pp512+tg64` is both. Tokens are
random and end tokens are ignored. Tokenisation and a warm-up run are not timed. Without a KV cache, every pass runs the
whole sequence, context included.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import islice

from mlx_engine.bench.estimate import rest
from mlx_engine.bench.samples import Result, Test
from mlx_engine.cache import New
from mlx_engine.decode.loop import decode, decode_without_cache, prefill
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.step import forward_logits
from mlx_engine.engine import Engine
from mlx_engine.errors import Words, require
from mlx_engine.opened import Opened
from mlx_engine.options import Sampling

# Prompt lengths measured to estimate a longer prompt. The second is run only if there is time.
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
    progress: Callable[[int, int], None] | None = None,
    between: Callable[[], None] = lambda: None,
) -> Result:
    """Run a test `repetitions` times, after a warm-up run.

    A `budget` in seconds for the whole cell reduces the repetitions; if only the warm-up run fits, it counts. If the
    test does not fit even once, a part is run and the rest extrapolated; `Result.estimated` says from what. Without
    `overlap`, a lazy backend starts a pass only after the previous one has ended. `between` is called before every run
    and after the last one, to measure the machine's limits at the same time.

    Raises:
        OptionError: the test is empty, or does not fit the model's context.
    """
    require(repetitions >= 1, option="repetitions", expected="a whole number >= 1", found=repetitions)
    require(budget is None or budget >= 0, option="budget", expected="a number of seconds >= 0", found=budget)
    check(test, engine)
    ids = random.Random(seed).choices(range(engine.config.vocab_size), k=test.depth + max(test.n_prompt, 1))
    deadline = None if budget is None else time.perf_counter() + budget
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
        if run.estimated and runs:
            break
        runs.append(run)
        between()
        if progress is not None:
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


def check(test: Test, engine: Engine | Opened) -> None:
    """Check that a test can be run.

    Raises:
        OptionError: the test is empty, or does not fit the model's context.
    """
    require(test.n_tokens > 0, option="test", expected="prompt tokens or tokens to generate", found=Words("none"))
    length, context = test.depth + test.n_tokens, engine.config.context_length
    require(length <= context, option=test.name, expected=f"at most {context:,} tokens, the context", found=length)


def _probe(engine: Engine, ids: list[int], deadline: float) -> tuple[int, float]:
    """Time a prompt shorter than `ids`. Return its length and seconds per token, of its second run if there is time."""
    probed, per_token = 0, 0.0
    with engine.backend.session():
        for n in PROBES:
            for _ in range(2):
                start = time.perf_counter()
                if probed and start + n * per_token > deadline:
                    break
                engine.backend.wait(forward_logits(engine.model, New(ids[:n], engine.model.scratch_kv(n))))
                probed, per_token = n, (time.perf_counter() - start) / n
    return probed, per_token


def _estimate(
    engine: Engine, test: Test, first: list[int], per_token: float, *, kv: bool, overlap: bool, deadline: float
) -> Result:
    """Estimate a test whose prefill exceeds the budget; decode is tried after a single token."""
    result = Result(test, [per_token * test.n_prompt], [])
    if test.n_gen:
        part = _run(engine, Test(n_gen=test.n_gen), first, kv=kv, overlap=overlap, deadline=deadline)
        result.passes, result.seconds = part.passes, [result.seconds[0] + part.seconds[0]]
    return result


def _run(engine: Engine, test: Test, ids: list[int], *, kv: bool, overlap: bool, deadline: float | None) -> Result:
    """Run the test once."""
    model, be = engine.model, engine.backend
    pick, metrics = Sampler(be, Sampling(), ids), Metrics()
    held = model.new_kv(test.depth + test.n_tokens)
    n_read = 1 if test.n_prompt else 0  # number of prefill passes
    with be.session():
        if kv and test.depth:
            be.wait(prefill(model, ids[: test.depth], held))
        if kv:
            tokens = decode(model, ids[test.depth :], held, pick, metrics, overlap=overlap)
        else:
            tokens = decode_without_cache(model, ids, pick, metrics)
        for i, _ in enumerate(islice(tokens, n_read + test.n_gen)):
            if deadline is not None and i >= n_read and time.perf_counter() > deadline:
                break
    read, written = metrics.passes[:n_read], metrics.passes[n_read:]
    result = Result(test, seconds=[sum(read)])
    if len(written) < test.n_gen:
        result.estimated = f"from {len(written)} of {test.n_gen} passes"
    if written:
        first = len(ids) + n_read
        lengths = [1 if kv else first + i for i in range(test.n_gen)]
        result.passes = [written]
        result.seconds[0] += sum(written) + sum(rest(written, lengths))
    return result
