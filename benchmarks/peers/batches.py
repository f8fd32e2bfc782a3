"""The interface of an engine that decodes several sequences at once, and the loop that times all engines.

This module imports nothing but the standard library, because an engine may have its own interpreter.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from benchmarks.peers.loop import Answer, Request

# Steps before the timed ones: another process has evicted the weights from the processor's caches.
WARM_STEPS = 1


class BatchPeer(ABC):
    """An engine with a model and several sequences, each with a prompt of its own; it chooses tokens greedily."""

    @abstractmethod
    def facts(self) -> Answer:
        """Return `versions` of the packages, and what else the rows record about the engine."""

    @abstractmethod
    def begin(self, n_sequences: int, n_steps: int) -> None:
        """Make the first sequences as long as their prompts, ready for so many steps; others are left out of steps."""

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
