"""What an engine must be able to do to be measured, and the one loop that times all of them.

Nothing but the standard library is imported here: the process may be that of any interpreter.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Request = dict[str, Any]
Answer = dict[str, Any]

# Tokens of the pass that tells how long a longer prompt would take.
PROBE = 16


class Peer(ABC):
    """An engine with a model and one context of tokens, greedy."""

    n_vocab: int

    @abstractmethod
    def facts(self) -> Answer:
        """`versions` of what computes, and whatever else belongs to its measurements."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the context, forget the others."""

    @abstractmethod
    def read(self, ids: Sequence[int]) -> int:
        """Run ids behind the context; the likeliest next id, on the host."""

    @abstractmethod
    def logits(self, ids: Sequence[int]) -> Any:
        """A float32 NumPy array (T, V): the logits at every position of a prompt of its own."""

    def use_threads(self, n: int | None) -> None:  # noqa: B027 - most engines take what they find
        """Run on so many threads from now on; None means all."""

    def session(self) -> AbstractContextManager[None]:
        """Held around every run."""
        return nullcontext()

    def read_rates(self) -> dict[str, list[float]]:
        """Bytes per second of reading the weights, by the way of reading; empty where it cannot tell."""
        return {}


def run(peer: Peer, request: Request, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """One run of a test: `n_prompt` tokens read, then `n_gen` written, behind `n_depth` that are there already.

    With a `budget` in seconds, a prompt that would not fit is read in part, and writing stops when the time is over.
    The rest is extrapolated; `estimated` says from what.
    """
    n_prompt, n_gen, budget = request["n_prompt"], request["n_gen"], request.get("budget")
    ids = random_ids(peer.n_vocab, max(n_prompt, 1), seed=1)
    peer.use_threads(request.get("threads"))
    peer.rewind(request["n_depth"])
    seconds, passes, token = 0.0, list[float](), ids[0]
    n_read, deadline = n_prompt, None if budget is None else clock() + budget

    def timed(what: Sequence[int]) -> float:
        nonlocal token
        start = clock()
        token = peer.read(what)
        return clock() - start

    with peer.session():
        if n_prompt:
            n_read = n_prompt if budget is None else affordable(peer, ids, budget, clock)
            seconds = timed(ids[:n_read]) * n_prompt / n_read
        while len(passes) < n_gen and (not passes or deadline is None or clock() < deadline):
            passes.append(timed([token]))
    if passes:
        seconds += sum(passes) * n_gen / len(passes)
    parts = [f"a pass of {n_read} tokens"] * (n_read < n_prompt)
    parts += [f"{len(passes)} of {n_gen} passes"] * (len(passes) < n_gen)
    return {"seconds": seconds, "passes": passes, "estimated": "from " + " and ".join(parts) if parts else None}


def affordable(peer: Peer, ids: Sequence[int], budget: float, clock: Callable[[], float]) -> int:
    """All tokens of a prompt, if a short pass lets one expect that they fit the budget; else as many as that pass."""
    if len(ids) <= PROBE:
        return len(ids)
    start = clock()
    peer.read(ids[:PROBE])
    expected = (clock() - start) / PROBE * len(ids)
    peer.rewind(0)
    return len(ids) if expected <= budget else PROBE


def fill(peer: Peer, n: int) -> None:
    """Let the context hold n tokens and nothing else."""
    peer.use_threads(None)
    peer.rewind(0)
    with peer.session():
        peer.read(random_ids(peer.n_vocab, n, seed=0))


def random_ids(n_vocab: int, n: int, seed: int) -> list[int]:
    """The same for every engine."""
    return random.Random(seed).choices(range(n_vocab), k=n)
