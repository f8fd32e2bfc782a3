"""A test as a request to the scheduler: its context is read first, untimed, and found again in the prefix cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from mlx_engine.bench.samples import Test
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import NoText, Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options
from mlx_engine.weights.model import Model


class TimedTest:
    """A test that is run step by step.

    Attributes:
        request: the request of the test. Its metrics have one time per pass: the prefill if the test has a prompt, then
            one per generated token.
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
        """Read the context of a test.

        Args:
            model: the model.
            test: the test.
            ids: the tokens of context and prompt; without a prompt, those of the context and one more.
            kv: use a KV cache; without it, every pass runs the whole sequence, context included.
            overlap: on a lazy backend, submit a pass before the previous one has ended.
            clock: read for all times.
        """
        self.request = _request(ids, test.n_gen + (test.n_prompt > 0), clock)
        self._n_cached = test.depth if kv else 0
        if not kv:
            pool = model.new_pool(self.request.longest, longest_pass=self.request.longest, kept=False)
            self._scheduler = Scheduler(model, pool, clock=clock)
        else:
            # A pool and its prefix cache refer to each other. Collect those of the last test, so that their memory is
            # used again: touching new pages took 120 ms of the 1,380 ms of 512 tokens of the 0.6B shape.
            gc.collect()
            # The prefix cache holds the context, and the sequence a copy of its last page.
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
        """Run one step; raise the error of a request that fails."""
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
    """Return a greedy request for so many tokens, whose text is not decoded."""
    options = Options(ignore_eos=True)
    return Request(ids, options, [Output(options, max_tokens=n_new, text=NoText(), end_ids=())], metrics=Metrics(clock))
