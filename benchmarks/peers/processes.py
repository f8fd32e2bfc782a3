"""The processes of one contest: each is opened and warmed up for its first run, and kept until the contest ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from benchmarks.peers.engines import ENGINES
from benchmarks.peers.plan import Contest, Contestant
from benchmarks.peers.process import PeerError, Process
from mlx_engine.bench.samples import Test

# Tokens of the warm-up run, and of that of an engine with a budget.
WARM = Test(n_prompt=512, n_gen=8)
WARM_SLOW = Test(n_prompt=16, n_gen=1)
# Slots of context beyond what the test needs.
SPARE = 8


class Processes:
    """Processes by contestant. Contestants that differ only in threads share a process and its KV cache."""

    def __init__(self, contest: Contest, model: str, interpreters: Mapping[str, str]) -> None:
        self._contest, self._model, self._interpreters = contest, model, interpreters
        self._made: dict[str, Process | PeerError] = {}

    def of(self, contestant: Contestant) -> Process:
        """Return the contestant's process, ready to run.

        Raises:
            PeerError: the engine is not installed, or failed; raised again for every later call.
        """
        key = f"{contestant.engine} {dict(contestant.opening)}"
        if key not in self._made:
            try:
                self._made[key] = self._opened(contestant)
            except PeerError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, PeerError):
            raise made
        return made

    def _opened(self, contestant: Contestant) -> Process:
        test = self._contest.test
        process = Process(
            ENGINES[contestant.engine].module,
            self._interpreters[contestant.engine],
            model=self._model,
            context=max(test.depth + test.n_tokens, WARM.n_prompt) + SPARE,
            **contestant.opening,
        )
        try:
            if test.depth:
                process.ask("fill", n=test.depth)
            most = WARM if contestant.budget is None else WARM_SLOW
            warm = Test(min(test.n_prompt, most.n_prompt), min(test.n_gen, most.n_gen), test.depth)
            process.ask("run", **asked(warm, contestant))
        except PeerError:
            process.close()
            raise
        return process

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for made in self._made.values():
            if isinstance(made, Process):
                made.close()


def asked(test: Test, contestant: Contestant) -> dict[str, Any]:
    """Return the arguments of a `run` request."""
    return {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.depth,
        "threads": contestant.threads,
        "budget": contestant.budget,
    }
