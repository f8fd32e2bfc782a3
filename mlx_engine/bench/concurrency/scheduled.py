"""Clients that submit requests to an engine's scheduler, without HTTP, in one thread."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from mlx_engine.bench.concurrency.figures import Run, Steps, Timed
from mlx_engine.bench.concurrency.load import Prompt
from mlx_engine.bench.sizes import Sizes
from mlx_engine.bench.work import pass_work
from mlx_engine.cache.pool import PAGE
from mlx_engine.cache.size import CacheSize
from mlx_engine.engine import Engine
from mlx_engine.options import Options
from mlx_engine.schedule.request import Request
from mlx_engine.schedule.scheduler import Report, Scheduler


class Scheduled:
    """Runs clients on a scheduler.

    Args:
        engine: the engine.
        sizes: sizes of its weights and caches, for the work of each step.
        slots: the largest number of clients.
        longest: tokens of the longest prompt and its answer.
        prefix_cache: keep prompts and answers for later requests that begin alike.
        overlap: on a lazy backend, submit each pass before the tokens of the last one are on the host.
        clock: read for all times.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sizes,
        *,
        slots: int,
        longest: int,
        prefix_cache: bool = False,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._sizes, self._clock = engine, sizes, clock
        # One sequence more than there are clients: the prefix cache keeps a prompt that no client runs.
        n_tokens = (slots + 1) * (longest + PAGE)
        self._settings = {
            "slots": slots,
            "kv_memory": CacheSize(engine.model.kv_layers, n_tokens).whole,
            "prefix_cache": prefix_cache,
            "overlap": overlap,
            "clock": clock,
        }
        self._scheduler = self._new_scheduler()

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return random token ids."""
        return draws.choices(range(self._engine.config.vocab_size), k=n_tokens)

    def forget(self) -> None:
        """Drop all cached prefixes, with the memory of the scheduler."""
        del self._scheduler  # before the memory of the next one is allocated
        self._scheduler = self._new_scheduler()

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; with `seconds`, cancel what has not ended by then.

        Raises:
            ContextLengthError: a prompt and its answer exceed the context.
        """
        options = Options.of(n_gen, ignore_eos=True)
        # Made before the clock starts: checking a prompt is the work of the client.
        queue = deque(self._engine.request(prompt, options) for prompt in prompts)
        clients = _Clients(self._scheduler, self._clock)
        start = self._clock()
        for _ in range(min(n_clients, len(queue))):
            clients.submit(queue.popleft())
        try:
            while self._scheduler.has_work:
                for _ in range(min(clients.step(), len(queue))):
                    clients.submit(queue.popleft())
                if seconds is not None and self._clock() >= start + seconds:
                    break
        finally:
            took = self._clock() - start
            was_cut = clients.cancel() > 0
        return Run(list(clients.timed.values()), took, clients.steps(self._sizes), was_cut or bool(queue))

    def _new_scheduler(self) -> Scheduler:
        return self._engine.scheduler(**self._settings)  # type: ignore[arg-type]


class _Clients:
    """Requests that are being run, their times, and the parts of each step."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._lengths: dict[Request, int] = {}
        self._steps: list[tuple[Report, list[tuple[int, int, int]]]] = []
        self.timed: dict[Request, Timed] = {}

    def submit(self, request: Request) -> None:
        """Submit a request."""
        self.timed[request] = Timed(self._clock())
        self._scheduler.submit(request)

    def step(self) -> int:
        """Run a step, record the new tokens, and return how many requests have ended."""
        report = self._scheduler.step()
        now = self._clock()
        self._steps.append((report, [self._part(request, now) for request in report.requests]))
        for request in report.ended:
            if request.error is not None:
                raise request.error
        return len(report.ended)

    def cancel(self) -> int:
        """Cancel all requests that have not ended, and return how many they are."""
        left = [request for request in self.timed if not request.has_ended]
        for request in left:
            self._scheduler.cancel(request)
        return len(left)

    def steps(self, sizes: Sizes) -> Steps:
        """Return what all steps did. Called when no clock runs: it takes longer than a step of a small model."""
        found = Steps()
        for report, parts in self._steps:
            if report.n_decode + report.n_prefill:
                found.add(report.n_decode, report.n_prefill, pass_work(sizes, parts))
        return found

    def _part(self, request: Request, now: float) -> tuple[int, int, int]:
        """Record a request's new tokens; return its part of the step: (new tokens, cached tokens, rows of logits)."""
        timed, n_tokens = self.timed[request], len(request.output.token_ids)
        n_new = n_tokens - timed.n_tokens
        timed.arrivals += [now] * n_new
        timed.n_tokens, timed.n_cached = n_tokens, request.n_cached
        # The last token of an answer is not in the KV cache.
        before = self._lengths.get(request, request.n_cached)
        self._lengths[request] = length = request.n_prefilled + max(n_tokens - 1, 0)
        return length - before, before, n_new
