"""Requests and schedulers on a micro model, for the tests of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx_engine
from mlx_engine.options import Options
from mlx_engine.schedule import Report, Request, Scheduler

MICRO = Path(__file__).parent / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPTS = [[5, 9, 300, 17, 2], [8], list(range(1, 31)), [400, 3], [7] * 12]
N = 12


class Clock:
    """A clock that moves by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def options(i: int = 0, n: int = N, **more: object) -> Options:
    """Every other one is sampled."""
    sampled = {"temperature": 1.5, "seed": i} if i % 2 else {}
    return Options.of(n, ignore_eos=True, **{**sampled, **more})


def requests(engine: mlx_engine.Engine, prompts: Sequence[list[int]] = PROMPTS, **more: object) -> list[Request]:
    return [engine.request(prompt, options(i, **more)) for i, prompt in enumerate(prompts)]


def alone(engine: mlx_engine.Engine, prompts: Sequence[list[int]] = PROMPTS, **more: object) -> list[list[int]]:
    streams = [engine.run(prompt, options(i, **more)) for i, prompt in enumerate(prompts)]
    return [(list(stream), stream.generation.token_ids)[1] for stream in streams]


def scheduler_of(engine: mlx_engine.Engine, n_tokens: int = 400, *, slots: int = 8, page: int = 4, **of: object):
    pool = engine.model.new_pool(n_tokens, n_sequences=slots, page=page)
    return Scheduler(engine.model, pool, slots=slots, **of)


def run(scheduler: Scheduler, limit: int = 1000) -> list[Report]:
    reports = list(_steps(scheduler, limit))
    assert scheduler.pool.free_pages(0) == pages(scheduler), "pages are missing"
    return reports


def _steps(scheduler: Scheduler, limit: int) -> Iterator[Report]:
    for _ in range(limit):
        if not scheduler.has_work:
            return
        yield scheduler.step()
    raise AssertionError(f"still at work after {limit} steps")


def pages(scheduler: Scheduler) -> int:
    """How many pages its pool has."""
    pool = scheduler.pool
    return -(-pool.n_tokens // pool.page) + scheduler.slots - 1


def ids(found: Sequence[Request]) -> list[list[int]]:
    return [request.output.token_ids for request in found]
