"""Profile one forward pass by operation and by part of the model. Runs on a copy of the backend, outside the cells."""

from __future__ import annotations

import copy
import random
import statistics
from typing import Any

from mlx_engine.backends.profiled import profiled
from mlx_engine.bench.samples import Result, Test
from mlx_engine.decode.loop import prefill
from mlx_engine.decode.sampler import Sampler
from mlx_engine.engine import Engine
from mlx_engine.observe.profiler import Profiler
from mlx_engine.options import Sampling

# The number of passes to profile; the one of median duration is kept.
PASSES = 5


def affordable(result: Result, seconds: float) -> int:
    """Return how many passes of a measured test fit into `seconds`, at most `PASSES`."""
    times = [s for passes in result.passes for s in passes] if result.test.n_gen else result.seconds
    if not times or (result.estimated and not result.test.n_gen):
        return 0
    return min(PASSES, int(seconds / statistics.median(times)))


def components(engine: Engine, test: Test, n_passes: int, *, seed: int = 0) -> dict[str, Any] | None:
    """Profile one pass of `test` with a cache: its prefill, or one decode step if it has no prompt.

    Return milliseconds, calls, floating-point operations and bytes per operation, and milliseconds per part of the
    model. Return None for a test of prefill and decode, or for 0 passes.
    """
    if n_passes < 1 or (test.n_prompt and test.n_gen):
        return None
    found = sorted((_pass(engine, test, seed) for _ in range(n_passes)), key=lambda taken: float(taken["ms"]))
    return found[len(found) // 2]


def _pass(engine: Engine, test: Test, seed: int) -> dict[str, Any]:
    profiler = Profiler()
    model = copy.copy(engine.model)
    model.backend = profiled(engine.backend, profiler)
    ids = random.Random(seed).choices(range(engine.config.vocab_size), k=test.depth + max(test.n_prompt, 1))
    pick = Sampler(model.backend, Sampling(), ids)
    with model.backend.session():
        kv = model.new_kv(len(ids) + 1)
        if test.depth:
            model.backend.wait(prefill(model, ids[: test.depth], kv))
        profiler.ops.clear()
        profiler.begin_pass()
        pick(prefill(model, ids[test.depth :], kv))
        taken = profiler.end_pass()
    ops = {
        name: {"calls": op.calls, "ms": op.seconds * 1e3, "flops": op.flops, "nbytes": op.nbytes}
        for name, op in sorted(profiler.ops.items(), key=lambda item: -item[1].seconds)
    }
    # A backend may fuse the last norm with the output head, so they are one part here.
    parts = {"embedding": taken["embedding"], "layers": taken["layers"], "head": taken["norm"] + taken["projection"]}
    return {"ms": sum(op["ms"] for op in ops.values()), "ops": ops, "parts": parts}
