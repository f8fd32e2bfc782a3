"""The choice of one token after another: it keeps what a choice depends on, the history and the random draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Choice:
    """A token that has been chosen, and on a lazy backend perhaps not been computed.

    Attributes:
        token: what `Backend.embed` takes for an id.
        logits: (1, V), what it was chosen from.
        place: where it stands in the history.
    """

    token: Token
    logits: Array
    place: int


class Sampler:
    """Logits (1, V) in, the chosen id out; or in two steps, the choice and then its id."""

    def __init__(self, backend: Backend, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._backend, self._sampling = backend, sampling
        self._recent: list[Token] = list(prompt)
        self._random = random.Random(None if sampling.seed is None else int(sampling.seed))
        self._is_argmax = sampling.is_greedy and sampling.repetition_penalty == 1
        self._settled: Choice | None = None

    def __call__(self, logits: Array) -> int:
        """Choose, wait until the id is on the host, and remember it."""
        return self.settle(self.choose(logits))

    def choose(self, logits: Array) -> Choice:
        """Choose; nothing waits for the id. The next choice may be made before this one is settled."""
        if self._is_argmax:
            token = self._backend.argmax(logits)
        else:
            token = self._backend.sample(logits, self._sampling, self._recent, self._random.random())
        self._recent.append(token)
        return Choice(token, logits, len(self._recent) - 1)

    def settle(self, choice: Choice) -> int:
        """The id of a choice, on the host."""
        chosen = self._recent[choice.place] = self._backend.token_id(choice.token)
        self._settled = choice
        return chosen

    def probability(self) -> float | None:
        """How likely the model held the last id, before any option had a say; None before the first.

        Computed when asked, from the logits that were kept: a run that nobody watches does not pay for it.
        """
        if self._settled is None:
            return None
        row = self._backend.host(self._settled.logits)[0].astype(np.float64)
        p = np.exp(row - row.max())
        return float(p[self._recent[self._settled.place]] / p.sum())
