"""The choice of one token after another: it keeps what a choice depends on, the history and the random draws."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw, Sampling


@dataclass(frozen=True, eq=False)
class Choice:
    """A token that has been chosen, and on a lazy backend perhaps not been computed.

    Attributes:
        token: what `Backend.embed` takes for an id.
        logits: (1, V), what it was chosen from.
        position: where it stands in the sequence.
    """

    token: Token
    logits: Array
    position: int


class Sampler:
    """What chooses the tokens of one sequence: `draw` for `Backend.choose`, then `add` and `settle` what it chose."""

    def __init__(self, backend: Backend, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._backend, self._sampling = backend, sampling
        self._recent: list[Token] = list(prompt)
        self._seed = secrets.randbits(64) if sampling.seed is None else int(sampling.seed)
        self._settled: Choice | None = None

    def __call__(self, logits: Array) -> int:
        """Choose from logits (1, V), wait until the id is on the host, and return it."""
        (token,) = self._backend.choose(logits, [self.draw()])
        return self.settle(self.add(token, logits))

    def draw(self) -> Draw:
        """Return how the next token is chosen. The choice before it need not be settled."""
        u = 0.0 if self._sampling.is_greedy else random_number(self._seed, len(self._recent))
        return Draw(self._sampling, self._recent, u)

    def add(self, token: Token, logits: Array) -> Choice:
        """Append a token that was chosen from logits (1, V); nothing waits for its id."""
        self._recent.append(token)
        return Choice(token, logits, len(self._recent) - 1)

    def settle(self, choice: Choice) -> int:
        """Return the id of a choice, on the host."""
        chosen = self._recent[choice.position] = self._backend.token_id(choice.token)
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
        return float(p[self._recent[self._settled.position]] / p.sum())


def random_number(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the seed and the position alone, for the draw of one token.

    A sequence that is interrupted and computed again, or runs beside others, draws the same numbers.
    """
    (bits,) = np.random.SeedSequence((seed, position)).generate_state(1, np.uint64)
    return float(bits >> np.uint64(11)) * 2.0**-53
