"""The interfaces of a measured engine, for one sequence and for several, and the loops that time all engines.

This module imports only the standard library, because each engine may run in an interpreter with other packages.
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

# With a budget, a pass of this many tokens is timed first, to estimate the time of the whole prompt.
PROBE = 16


class Peer(ABC):
    """An engine with a model and one sequence; it chooses tokens greedily."""

    n_vocab: int

    @abstractmethod
    def facts(self) -> Answer:
        """Return `versions` of the packages, and what else the rows record about the engine."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the KV cache, drop the others."""

    @abstractmethod
    def read(self, ids: Sequence[int]) -> int:
        """Append ids to the sequence and return the most likely next id, on the host."""

    def fill(self, ids: Sequence[int]) -> None:
        """Append ids to the empty sequence. Keys and values may be any numbers: decode takes the same time."""
        self.read(ids)

    @abstractmethod
    def logits(self, ids: Sequence[int]) -> Any:
        """Return float32 logits (T, V) at every position of a separate prompt."""

    def use_threads(self, n: int | None) -> None:  # noqa: B027 - most engines always use all cores
        """Set the number of threads of later runs; None means all cores."""

    def session(self) -> AbstractContextManager[None]:
        """Return a context manager that is entered around every run."""
        return nullcontext()

    def cache(self) -> Answer:
        """Return the tokens of the sequence and the bytes that hold them; empty if the engine does not report them."""
        return {}

    def read_rates(self) -> dict[str, list[float]]:
        """Return the bytes per second at which the weights can be read: `in_order` in one stream, `fastest` in eight.

        Empty if the engine cannot measure this.
        """
        return {}


def run(peer: Peer, request: Request, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Run a test once: prefill of `n_prompt` tokens, then decode of `n_gen`, after `n_depth` cached tokens.

    With a `budget` in seconds, only a part of a prompt that would take longer is read, and decode stops when the time
    is over. The rest is extrapolated; `estimated` names the part that was measured.
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
    """Return how many tokens of a prompt to read: all if a short pass shows that they fit into the budget, or PROBE."""
    if len(ids) <= PROBE:
        return len(ids)
    start = clock()
    peer.read(ids[:PROBE])
    expected = (clock() - start) / PROBE * len(ids)
    peer.rewind(0)
    return len(ids) if expected <= budget else PROBE


def fill(peer: Peer, n: int) -> None:
    """Fill the KV cache with exactly n tokens."""
    peer.use_threads(None)
    peer.rewind(0)
    with peer.session():
        peer.fill(random_ids(peer.n_vocab, n, seed=0))


def random_ids(n_vocab: int, n: int, seed: int) -> list[int]:
    """Return random ids, the same for every engine."""
    return random.Random(seed).choices(range(n_vocab), k=n)


# Steps that are run before the timed ones, because another process has evicted the weights from the processor's caches.
WARM_STEPS = 1


class BatchPeer(ABC):
    """An engine with a model and several sequences, each with a prompt of its own; it chooses tokens greedily."""

    @abstractmethod
    def facts(self) -> Answer:
        """Return `versions` of the packages, and what else the rows record about the engine."""

    @abstractmethod
    def begin(self, n_sequences: int, n_steps: int) -> None:
        """Prepare `n_steps` steps of the first `n_sequences` sequences, each with its prompt in the KV cache."""

    @abstractmethod
    def step(self) -> None:
        """Append a token to each sequence, and return when all of them are on the host."""

    def limits(self) -> dict[str, float]:
        """Return memory bandwidth and peak arithmetic of the machine; empty if the engine cannot measure them."""
        return {}


def decode(peer: BatchPeer, request: Request, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Run `n_steps` decode steps of `n_sequences` sequences, and return the seconds of each."""
    peer.begin(request["n_sequences"], request["n_steps"] + WARM_STEPS)
    seconds = []
    for _ in range(request["n_steps"] + WARM_STEPS):
        start = clock()
        peer.step()
        seconds.append(clock() - start)
    return {"seconds": seconds[WARM_STEPS:]}


def prompts(n_vocab: int, n_sequences: int, depth: int) -> list[list[int]]:
    """Return random prompts of `depth` tokens, the same for every engine."""
    draws = random.Random(0)
    return [draws.choices(range(n_vocab), k=depth) for _ in range(n_sequences)]
